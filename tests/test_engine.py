"""The step loop and the offline API on a tiny model."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

from mini_engine import LLM, EngineConfig, LLMEngine, SamplingParams
from mini_engine.errors import ConfigError, PoolTooSmall, RequestError
from tests.builders import EOS, tiny_llama_dir

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(20, 50))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture
def llm(model: str) -> LLM:
    return LLM(model, dtype="float32", block_size=4, max_model_len=128, num_gpu_blocks_override=65)


def tokens(llm: LLM, prompt: Any = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params)[0].outputs[0].token_ids


def drain(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def assert_idle(llm: LLM) -> None:
    """Nothing is left over: no request, no sequence, no block."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished_requests() and not scheduler.has_unfinished()
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_usable_blocks
    scheduler.blocks.check([])


class TestOutputs:
    def test_text_is_what_the_tokens_decode_to(self, llm: LLM) -> None:
        output = llm.generate("the quick brown fox", GREEDY)[0]
        assert output.prompt == "the quick brown fox"
        assert output.prompt_token_ids == llm.engine.tokenizer.encode("the quick brown fox")
        only = output.outputs[0]
        assert only.text == llm.engine.tokenizer.decode(only.token_ids, skip_special_tokens=True)
        assert (len(only.token_ids), only.finish_reason, only.logprobs) == (12, "length", None)

    def test_outputs_come_in_the_order_of_the_prompts(self, llm: LLM) -> None:
        prompts = [{"prompt_token_ids": [i] * (40 - 3 * i)} for i in range(10, 4, -1)]
        params = [SamplingParams(temperature=0, max_tokens=2 + i, ignore_eos=True) for i in range(len(prompts))]
        outputs = llm.generate(prompts, params)
        assert [output.prompt_token_ids for output in outputs] == [p["prompt_token_ids"] for p in prompts]
        assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 3, 4, 5, 6, 7]

    def test_metrics(self, model: str) -> None:
        ticks = iter(range(10_000))
        engine = LLMEngine(EngineConfig(model, dtype="float32", max_num_batched_tokens=16), lambda: float(next(ticks)))
        record = engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        drain(engine)
        metrics: Any = record.metrics
        assert len(metrics.token_times) == 3 and len(metrics.itl) == 2
        assert metrics.arrival < metrics.scheduled < metrics.token_times[0]
        assert metrics.ttft + sum(metrics.itl) == metrics.finished - metrics.arrival
        assert metrics.queue_time == metrics.scheduled - metrics.arrival
        assert metrics.tokens_per_second == 2 / sum(metrics.itl)
        assert "TTFT" in metrics.summary() and "tok/s" in metrics.summary()

    def test_logprobs_hold_the_drawn_token_and_the_likeliest(self, llm: LLM) -> None:
        params = SamplingParams(temperature=3.0, seed=4, max_tokens=6, logprobs=2, ignore_eos=True)
        output = llm.generate(PROMPT, params)[0].outputs[0]
        assert output.logprobs is not None
        for token, report in zip(output.token_ids, output.logprobs, strict=True):
            assert token in report and len(report) in (2, 3)
            assert [entry.rank for entry in report.values()][:2] == [1, 2]

    def test_a_prefix_hit_is_reported(self, llm: LLM) -> None:
        first, second = (llm.generate(PROMPT, GREEDY)[0] for _ in range(2))
        assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) == (0, 28)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert llm.engine.reset_prefix_cache()
        assert llm.generate(PROMPT, GREEDY)[0].metrics.num_cached_tokens == 0

    def test_cache_salt_separates_users(self, llm: LLM) -> None:
        def hit(salt: str | None) -> int:
            return llm.generate(PROMPT, GREEDY, cache_salt=salt)[0].metrics.num_cached_tokens

        assert [hit("a"), hit("b"), hit("a"), hit(None)] == [0, 0, 28, 0]


class TestStopping:
    def test_end_of_text_stops_unless_ignored(self, llm: LLM) -> None:
        free = tokens(llm, params=SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        llm.engine.eos_token_ids = frozenset({free[5]})
        output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0]
        assert output.token_ids == free[: free.index(free[5]) + 1]
        assert output.finish_reason == "stop"
        assert tokens(llm, params=SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)) == free

    def test_stop_token_ids_and_min_tokens(self, llm: LLM) -> None:
        free = tokens(llm)
        params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[free[2]], ignore_eos=True)
        output = llm.generate(PROMPT, params)[0].outputs[0]
        assert output.token_ids == free[: free.index(free[2]) + 1]
        late = SamplingParams(temperature=0, max_tokens=12, min_tokens=8, stop_token_ids=[free[2]], ignore_eos=True)
        later = tokens(llm, params=late)
        assert len(later) >= 8 and free[2] not in later[:8]

    def test_a_stop_string_ends_the_text_before_it(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        text = llm.generate("the quick", params)[0].outputs[0].text
        stop = text[8:11]
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=[stop])
        output = llm.generate("the quick", params)[0].outputs[0]
        assert output.text == text[: text.index(stop)]
        assert output.finish_reason == "stop"
        assert len(output.token_ids) < 30
        assert_idle(llm)

    def test_a_request_at_the_very_end_of_pool_and_context(self, model: str) -> None:
        llm = LLM(model, dtype="float32", block_size=4, num_gpu_blocks_override=9)  # 32 slots
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        assert len(tokens(llm, PROMPT, params)) == 3  # 30 + 3 - 1 = 32
        with pytest.raises(PoolTooSmall, match=r"needs 9 blocks of 4 tokens \(30 prompt \+ 4 output\), the pool has 8"):
            llm.generate(PROMPT, SamplingParams(max_tokens=4))


class TestSampling:
    def test_a_seed_repeats_whatever_runs_beside_it(self, llm: LLM) -> None:
        params = SamplingParams(temperature=2.0, seed=7, max_tokens=10, ignore_eos=True)
        alone = tokens(llm, params=params)
        others = [{"prompt_token_ids": [i, i + 1]} for i in range(10, 14)]
        noise = SamplingParams(temperature=2.0, max_tokens=15, ignore_eos=True)
        crowd = llm.generate([*others, PROMPT], [noise] * 4 + [params])
        assert crowd[-1].outputs[0].token_ids == alone
        other_seed = SamplingParams(temperature=2.0, seed=8, max_tokens=10, ignore_eos=True)
        assert tokens(llm, params=other_seed) != alone

    def test_without_a_seed_two_requests_differ_and_an_engine_repeats(self, model: str) -> None:
        params = SamplingParams(temperature=2.0, max_tokens=10, ignore_eos=True)

        def run(seed: int) -> list[list[int]]:
            llm = LLM(model, dtype="float32", seed=seed)
            return [output.outputs[0].token_ids for output in llm.generate([PROMPT, PROMPT], params)]

        first = run(0)
        assert first[0] != first[1]
        assert run(0) == first
        assert run(1) != first

    def test_n_outputs_fork_after_one_prefill(self, llm: LLM) -> None:
        params = SamplingParams(n=3, temperature=2.0, seed=5, max_tokens=8, ignore_eos=True)
        output = llm.generate(PROMPT, params)[0]
        answers = [each.token_ids for each in output.outputs]
        assert [each.index for each in output.outputs] == [0, 1, 2]
        assert len({tuple(answer) for answer in answers}) == 3
        assert all(len(each.token_ids) == 8 and each.finish_reason == "length" for each in output.outputs)
        assert llm.engine.scheduler.stats.num_scheduled_tokens == 30 + 3 * 7
        alone = SamplingParams(temperature=2.0, seed=6, max_tokens=8, ignore_eos=True)  # sibling 1 draws with seed + 1
        assert tokens(llm, params=alone) == answers[1]
        assert_idle(llm)


class TestStreaming:
    def test_deltas_add_up(self, llm: LLM) -> None:
        whole = llm.generate("the quick", GREEDY)[0].outputs[0]
        deltas = list(llm.stream("the quick", GREEDY))
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
        assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]

    def test_two_streams_read_in_turn(self, llm: LLM) -> None:
        prompts = ["the quick", "again and"]
        whole = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in prompts]
        streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
        texts = ["", ""]
        for pair in itertools.zip_longest(*streams):  # a step advances both, so one may get two tokens at once
            for i, delta in enumerate(pair):
                texts[i] += delta.text if delta else ""
        assert texts == whole

    def test_leaving_early_aborts(self, llm: LLM) -> None:
        for delta in llm.stream(PROMPT, GREEDY):
            assert delta.token_ids
            break
        gc.collect()
        assert_idle(llm)
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        stream.close()
        assert stream.record.outputs[0].finish_reason == "abort"
        assert_idle(llm)

    def test_a_refusal_comes_at_the_call(self, llm: LLM) -> None:
        with pytest.raises(RequestError):
            llm.stream({"prompt_token_ids": []}, GREEDY)
        assert_idle(llm)


class TestChat:
    def test_one_conversation_or_several(self, llm: LLM) -> None:
        talk = [{"role": "user", "content": "the cat"}]
        one = llm.chat(talk, GREEDY)
        many = llm.chat([talk, talk], GREEDY)
        assert one[0].prompt == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
        assert [o.outputs[0].token_ids for o in many] == [one[0].outputs[0].token_ids] * 2
        assert one[0].prompt_token_ids == llm.engine.tokenizer.encode(one[0].prompt, add_special_tokens=False)


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", "the prompt is empty"),
            ({"prompt_token_ids": []}, "the prompt is empty"),
            ({"prompt_token_ids": [5, 320]}, r"token id 320 at position 1 of prompt is outside .* \(0 to 319\)"),
            ({"prompt_token_ids": [-1]}, "token id -1 at position 0"),
            ({"prompt_token_ids": [1.5]}, "a prompt is a text or"),
            ({"prompt_token_ids": "12"}, "a prompt is a text or"),
            ({"text": "hi"}, "a prompt is a text or"),
            (17, "a prompt is a text or"),
            ({"prompt_token_ids": [5] * 200}, "200 prompt . 12 output tokens exceed max_model_len 128: shorten"),
            ({"prompt_token_ids": [5] * 120}, "exceed max_model_len 128: ask for at most 9 output tokens"),
        ],
    )
    def test_a_bad_prompt_names_its_index_and_nothing_runs(self, llm: LLM, prompt: Any, message: str) -> None:
        with pytest.raises(RequestError, match=f"^prompt 1: .*{message}"):
            llm.generate([PROMPT, prompt], GREEDY)
        assert llm.engine.scheduler.stats.num_scheduled_tokens == 0
        assert_idle(llm)

    def test_a_refused_request_leaves_the_others_alone(self, llm: LLM) -> None:
        expected = tokens(llm)
        engine = llm.engine
        record = engine.add_request("good", PROMPT, GREEDY)
        engine.step()
        for bad in ("", {"prompt_token_ids": [9999]}):
            with pytest.raises(RequestError):
                engine.add_request("bad", bad, GREEDY)
        with pytest.raises(RequestError, match="'good' is in use"):
            engine.add_request("good", PROMPT, GREEDY)
        drain(engine)
        assert record.outputs[0].token_ids == expected

    def test_stop_tokens_outside_the_vocabulary(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="token id 400 at position 0 of stop_token_ids"):
            llm.generate(PROMPT, SamplingParams(stop_token_ids=[400]))

    def test_counts_that_do_not_match(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="3 sampling parameters for 1 prompts"):
            llm.generate([PROMPT], [GREEDY] * 3)
        with pytest.raises(RequestError, match="2 priorities for 1 prompts"):
            llm.generate([PROMPT], GREEDY, priority=[1, 2])

    def test_engine_options(self, model: str) -> None:
        with pytest.raises(ConfigError, match="unknown engine option blocksize; known are model, dtype"):
            LLM(model, blocksize=4)
        with pytest.raises(ConfigError, match="max_model_len 512 exceeds the 256 positions"):
            LLM(model, max_model_len=512)
        with pytest.raises(PoolTooSmall, match=r"MiB for the KV cache hold 0 blocks of .* Raise kv_cache_memory_bytes"):
            LLM(model, kv_cache_memory_bytes=100)
        if not torch.cuda.is_available():
            with pytest.raises(ConfigError, match="device 'cuda' is not there: PyTorch .* Use device 'cpu'"):
                LLM(model, device="cuda")


class TestFailures:
    @pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
    def test_after_a_failed_step_the_requests_are_computed_anew(
        self, llm: LLM, failure: BaseException, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = [o.outputs[0].token_ids for o in llm.generate([PROMPT, "the cat"], GREEDY)]
        engine = llm.engine
        records = [engine.add_request("a", PROMPT, GREEDY), engine.add_request("b", "the cat", GREEDY)]
        for _ in range(3):
            engine.step()
        failed = []

        def fail_in_the_middle(output: Any, batch: Any) -> None:
            for pool in (engine.runner.kv.k, engine.runner.kv.v):
                pool[0].flatten(0, 1)[batch.slot_mapping] = 7.0  # the first layer has written
            failed.append(output)
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "run", fail_in_the_middle)
            with pytest.raises(type(failure)):
                engine.step()
        assert len(failed) == 1
        drain(engine)
        assert [record.outputs[0].token_ids for record in records] == expected
        assert_idle(llm)

    def test_an_interrupted_generate_leaves_nothing_behind(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = tokens(llm)
        real, count = llm.engine.runner.execute, iter(range(100))

        def interrupt(output: Any) -> torch.Tensor:
            if next(count) == 4:
                raise KeyboardInterrupt
            return real(output)

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "execute", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPT, "the cat"], GREEDY)
        assert_idle(llm)
        assert tokens(llm) == expected

    def test_abort_frees_at_once_and_disturbs_nobody(self, llm: LLM) -> None:
        expected = tokens(llm)
        engine = llm.engine
        kept, gone = engine.add_request("kept", PROMPT, GREEDY), engine.add_request("gone", "the cat", GREEDY)
        waiting = engine.add_request("never ran", PROMPT, GREEDY)
        engine.abort("never ran")
        engine.step()
        used = engine.scheduler.blocks.num_free_blocks
        engine.abort("gone")
        engine.abort("gone")
        engine.abort("unknown")
        assert engine.scheduler.blocks.num_free_blocks > used
        assert (gone.finished, gone.outputs[0].finish_reason) == (True, "abort")
        assert (waiting.finished, waiting.outputs[0].token_ids) == (True, [])
        drain(engine)
        assert kept.outputs[0].token_ids == expected
        assert_idle(llm)

    @pytest.mark.parametrize("steps", [0, 1, 4])
    def test_abort_of_a_request_with_several_outputs(self, llm: LLM, steps: int) -> None:
        record = llm.engine.add_request("a", PROMPT, SamplingParams(n=4, temperature=1.0, max_tokens=50))
        for _ in range(steps):
            llm.engine.step()
        llm.engine.abort("a")
        assert record.finished
        assert all(output.finish_reason == "abort" for output in record.outputs)
        assert_idle(llm)


def test_priorities_order_the_first_tokens(model: str) -> None:
    llm = LLM(model, dtype="float32", scheduling_policy="priority", max_num_seqs=1)
    outputs = llm.generate([PROMPT] * 3, GREEDY, priority=[2, 0, 1])
    first = [output.metrics.token_times[0] for output in outputs]
    assert sorted(range(3), key=first.__getitem__) == [1, 2, 0]


def test_an_engine_config_may_be_given_whole(model: str) -> None:
    config = EngineConfig(model, dtype="float32", block_size=8)
    assert LLM(config).engine.config == config
    assert LLM(model, config, block_size=4).engine.config.block_size == 4


def test_eos_of_the_checkpoint_is_known(llm: LLM) -> None:
    assert EOS in llm.engine.eos_token_ids


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, mini_engine; from mini_engine import SamplingParams, EngineConfig; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
