"""The HTTP server over real sockets, on a tiny model. The oracle is the offline API with the same parameters."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.cli import main
from tests.builders import tiny_llama_dir
from tests.serving import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    IDS,
    NAME,
    SMALL,
    TALK,
    Gate,
    RunningServer,
    choices,
    events,
    offline,
    until,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[RunningServer]:
    with RunningServer(model) as running:
        yield running


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, **SMALL)


@pytest.fixture
def gate(server: RunningServer) -> Iterator[Gate]:
    gate = Gate(server.engine)
    yield gate
    gate.remove()
    server.assert_idle()


class TestCompletions:
    @pytest.mark.parametrize(
        "prompt", ["the cat", IDS, ["the cat", "again"], [IDS, [5, 6]], ["the cat", IDS]], ids=lambda p: str(p)[:20]
    )
    def test_a_prompt_is_text_or_ids_or_a_list_of_either(self, server: RunningServer, llm: LLM, prompt: Any) -> None:
        status, answer = server.post(COMPLETIONS, {"prompt": prompt, "return_token_ids": True, **GREEDY})
        each = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        assert status == 200
        assert choices(answer) == [offline(llm, one)[0] for one in each]
        prompt_tokens = sum(
            len(one) if isinstance(one, list) else len(llm.engine.tokenizer.encode(one)) for one in each
        )
        made = 12 * len(each)
        assert answer["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": made,
            "total_tokens": prompt_tokens + made,
        }
        assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", NAME, "cmpl-")

    @pytest.mark.parametrize(
        "params",
        [
            {"n": 3, "temperature": 2.0, "seed": 5},
            {"temperature": 2.0, "seed": 5, "top_k": 3},
            {"temperature": 2.0, "seed": 5, "top_p": 0.3},
            {"max_tokens": 3},
            {"max_tokens": 40, "stop": "e"},
            {"max_tokens": 40, "stop": ["zz", "a"]},
            {"max_tokens": 40, "ignore_eos": False},
        ],
        ids=str,
    )
    def test_sampling_parameters_arrive(self, server: RunningServer, llm: LLM, params: dict[str, Any]) -> None:
        _, answer = server.post(COMPLETIONS, {"prompt": "the cat", "return_token_ids": True, **GREEDY, **params})
        assert choices(answer) == offline(llm, "the cat", **params)

    def test_stop_tokens_and_min_tokens_arrive(self, server: RunningServer, llm: LLM) -> None:
        free = offline(llm, IDS)[0][1]
        for min_tokens in (0, 8):
            params = {"stop_token_ids": [free[2]], "min_tokens": min_tokens}
            _, answer = server.post(COMPLETIONS, {"prompt": IDS, "return_token_ids": True, **GREEDY, **params})
            assert choices(answer) == offline(llm, IDS, **params)
            assert (len(answer["choices"][0]["token_ids"]) == free.index(free[2]) + 1) == (min_tokens == 0)

    def test_defaults_are_openais(self, server: RunningServer) -> None:
        _, answer = server.post(COMPLETIONS, {"prompt": "the cat", "ignore_eos": True, "stop": None, "n": None})
        assert answer["usage"]["completion_tokens"] == 16
        _, answer = server.post(COMPLETIONS, {"prompt": IDS, "ignore_eos": True, "max_tokens": None})
        assert answer["usage"]["total_tokens"] == SMALL["max_model_len"] + 1  # the last token is never fed back

    def test_logprobs(self, server: RunningServer, llm: LLM) -> None:
        _, answer = server.post(COMPLETIONS, {"prompt": IDS, **GREEDY, "temperature": 3.0, "seed": 4, "logprobs": 2})
        params = SamplingParams(temperature=3.0, seed=4, max_tokens=12, ignore_eos=True, logprobs=2)
        output = llm.generate({"prompt_token_ids": IDS}, params)[0].outputs[0]
        assert output.logprobs is not None
        decode = llm.engine.tokenizer.decode
        found = answer["choices"][0]["logprobs"]
        texts = [decode([token]) for token in output.token_ids]
        assert found["tokens"] == texts
        assert found["text_offset"] == [len("".join(texts[:i])) for i in range(12)]
        expected = [report[token].logprob for token, report in zip(output.token_ids, output.logprobs, strict=True)]
        assert found["token_logprobs"] == pytest.approx(expected)
        for entry, report in zip(found["top_logprobs"], output.logprobs, strict=True):
            likeliest: dict[str, float] = {}
            for token, logprob in report.items():
                likeliest.setdefault(decode([token]), logprob.logprob)
            assert list(entry.items()) == [(text, pytest.approx(value)) for text, value in likeliest.items()]


class TestStreaming:
    def test_one_chunk_a_token_then_the_usage_then_done(self, server: RunningServer, llm: LLM) -> None:
        options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
        *chunks, usage, done = server.stream(COMPLETIONS, {"prompt": IDS, **GREEDY, **options})
        text, token_ids, _ = offline(llm, IDS)[0]
        parts = [chunk["choices"][0] for chunk in chunks]
        assert [part["token_ids"] for part in parts] == [[token] for token in token_ids]
        assert "".join(part["text"] for part in parts) == text
        assert [part["finish_reason"] for part in parts] == [None] * 11 + ["length"]
        assert parts[0]["prompt_token_ids"] == IDS and "prompt_token_ids" not in parts[1]
        assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
        assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 42
        assert done == "[DONE]"

    def test_choices_of_several_prompts_keep_apart(self, server: RunningServer, llm: LLM) -> None:
        params = {"n": 2, "temperature": 2.0, "seed": 3}
        found = server.stream(COMPLETIONS, {"prompt": ["the cat", IDS], **GREEDY, **params})
        texts = ["", "", "", ""]
        for chunk in found[:-1]:
            (part,) = chunk["choices"]
            texts[part["index"]] += part["text"]
        expected = offline(llm, "the cat", **params) + offline(llm, IDS, **params)
        assert texts == [text for text, _, _ in expected]
        assert "usage" not in found[-2]

    def test_chat_begins_with_the_role(self, server: RunningServer, llm: LLM) -> None:
        first, *chunks, _ = server.stream(CHAT, {"messages": TALK, **GREEDY})
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        assert text == llm.chat(TALK, SamplingParams(**GREEDY))[0].outputs[0].text
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert first["object"] == "chat.completion.chunk"


class TestChat:
    @pytest.mark.parametrize("content", ["the cat", [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]])
    def test_is_the_offline_chat(self, server: RunningServer, llm: LLM, content: Any) -> None:
        body = {"messages": [{"role": "user", "content": content}], "return_token_ids": True, **GREEDY}
        _, answer = server.post(CHAT, body)
        flat = [{"role": "user", "content": content if isinstance(content, str) else "the\ncat"}]
        output = llm.chat(flat, SamplingParams(**GREEDY))[0].outputs[0]
        assert choices(answer) == [(output.text, output.token_ids, "length")]
        assert answer["object"] == "chat.completion" and answer["choices"][0]["message"]["role"] == "assistant"

    def test_without_max_tokens_it_may_fill_the_context(self, server: RunningServer) -> None:
        _, answer = server.post(CHAT, {"messages": TALK, "ignore_eos": True, "min_tokens": 30, "seed": 1})
        assert answer["usage"]["total_tokens"] == SMALL["max_model_len"] + 1
        _, answer = server.post(CHAT, {"messages": TALK, "ignore_eos": True, "max_completion_tokens": 5})
        assert answer["usage"]["completion_tokens"] == 5

    def test_the_template_gets_its_variables(self, server: RunningServer, llm: LLM) -> None:
        body = {"messages": TALK, "add_generation_prompt": False, "return_token_ids": True, **GREEDY}
        _, answer = server.post(CHAT, body)
        tokenizer = llm.engine.tokenizer
        assert answer["choices"][0]["prompt_token_ids"] == tokenizer.encode_chat(TALK, add_generation_prompt=False)

    def test_logprobs(self, server: RunningServer, llm: LLM) -> None:
        params = {**GREEDY, "temperature": 3.0, "seed": 4}
        output = llm.chat(TALK, SamplingParams(**params, logprobs=2))[0].outputs[0]
        assert output.logprobs is not None
        for top in (0, 2):
            _, answer = server.post(CHAT, {"messages": TALK, "logprobs": True, "top_logprobs": top, **params})
            content = answer["choices"][0]["logprobs"]["content"]
            expected = [report[token].logprob for token, report in zip(output.token_ids, output.logprobs, strict=True)]
            assert [entry["logprob"] for entry in content] == pytest.approx(expected)
            for entry, report in zip(content, output.logprobs, strict=True):
                likeliest = [llm.engine.tokenizer.decode([token]) for token in report][:top]
                assert [each["token"] for each in entry["top_logprobs"]] == likeliest
                assert bytes(entry["bytes"]).decode() == entry["token"]


class TestTheRest:
    def test_models(self, server: RunningServer) -> None:
        (entry,) = json.loads(server.request("GET", "/v1/models")[1])["data"]
        assert (entry["id"], entry["object"], entry["max_model_len"]) == (NAME, "model", 128)

    def test_metrics_count(self, model: str) -> None:
        with RunningServer(model) as server:
            server.post(COMPLETIONS, {"prompt": IDS, **GREEDY})
            server.stream(COMPLETIONS, {"prompt": [IDS, "the cat"], **GREEDY, "n": 2})
            server.post(COMPLETIONS, {"prompt": IDS, **GREEDY, "cache_salt": "mine"})
            prompt_tokens = 3 * 30 + len(server.engine.tokenizer.encode("the cat"))
            counted = {
                "prompt_tokens_total": prompt_tokens,
                "generation_tokens_total": 12 + 4 * 12 + 12,
                "prefix_cache_queries_total": prompt_tokens,
                "prefix_cache_hits_total": 28,  # seven blocks of four, and none for the one with a salt
                "request_success_total": 4,
                "num_requests_running": 0,
                "num_requests_waiting": 0,
                "kv_cache_usage_perc": 0,
                "num_preemptions_total": 0,
            }
            assert {name: server.metric(name) for name in counted} == counted
            text = server.request("GET", "/metrics")[1]
            assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 4' in text
            for line in text.splitlines():
                assert line.startswith(("# HELP vllm:", "# TYPE vllm:", "vllm:"))

    def test_gauges_while_it_runs(self, server: RunningServer, gate: Gate) -> None:
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(server.post, COMPLETIONS, {"prompt": IDS, **GREEDY, "n": 2, "temperature": 1})
            gate.allow(3)
            until(lambda: server.metric("num_requests_running") == 2)
            until(lambda: server.metric("kv_cache_usage_perc") == pytest.approx(9 / 64))  # 7 shared, a tail each
            gate.allow(20)
            answer.result()


class TestTheCommand:
    def test_control_c_ends_open_answers_and_the_server(self, model: str) -> None:
        command = [sys.executable, "-m", "mini_engine", "serve", "--model", model, "--port", "0"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        line = process.stderr.readline()
        announced = re.fullmatch(rf"mini-engine: serving {model} on http://127.0.0.1:(\d+) \(Ctrl-C ends it\)\n", line)
        assert announced, line
        connection = http.client.HTTPConnection("127.0.0.1", int(announced[1]), timeout=60)
        body = {"prompt": "the cat", "max_tokens": 200, "min_tokens": 200, "stream": True, "n": 64, "temperature": 1}
        connection.request("POST", COMPLETIONS, json.dumps(body))
        stream = events(connection.getresponse())
        assert next(stream)["choices"]
        process.send_signal(signal.SIGINT)
        *_, error, done = stream
        assert (error["error"]["code"], done) == (503, "[DONE]")
        assert error["error"]["message"] == "the server is shutting down"
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err.strip()) == (130, "mini-engine: interrupted")

    def test_a_port_in_use_is_one_line(self, server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["serve", "--port", str(server.port), "--model", "no-model-is-looked-for"]) == 2
        assert f"cannot serve on 127.0.0.1 port {server.port}: Address already in use" in capsys.readouterr().err

    def test_torchrun_is_refused(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        assert main(["serve", "--port", "0"]) == 2
        assert "serve without torchrun" in capsys.readouterr().err
