"""Runs that count blocks: the same with a model and without, and a cancel with and without a step in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from coursekit.block_runs import Asked, Cancelled, cancel, repeated, serve
from mini_engine import EngineConfig, LLMEngine, SamplingParams
from mini_engine.config import SchedulerConfig
from tests.builders import tiny_llama_dir

SIZE, PROMPT, OUTPUT = 4, list(range(30, 48)), 6  # 18 tokens: four full blocks and a started one


def engine_of(directory: Path, **settings) -> LLMEngine:
    config = EngineConfig(
        model=str(directory), device="cpu", dtype="float32", block_size=SIZE, num_gpu_blocks_override=64, **settings
    )
    return LLMEngine(config)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> LLMEngine:
    return engine_of(model)


def ask(name: str, seed: int = 1, n: int = 1, output: int = OUTPUT, prompt: list[int] = PROMPT) -> Asked:
    return Asked(name, prompt, SamplingParams(n=n, temperature=1.0, seed=seed, max_tokens=output, ignore_eos=True))


def config(**settings) -> SchedulerConfig:
    return SchedulerConfig(**{"block_size": SIZE, "num_blocks": 64, "max_model_len": 64, **settings})


FOUR = [ask(f"branch {i}", seed=1 + i) for i in range(4)]
WAYS = {  # waves, settings → references, blocks, prompt tokens of the last wave, copies; 23 tokens are 6 blocks each
    "cache off": ([FOUR], {"enable_prefix_caching": False}, (24, 24, 4 * 18, 0)),
    "cold": ([FOUR], {}, (24, 4 + 4 * 2, 18 + 3 * 2, 0)),
    "warm": ([[ask("earlier", output=1)], FOUR], {}, (24, 4 + 4 * 2, 4 * 2, 0)),
    "fork": ([[ask("branch", n=4)]], {}, (24, 4 + 4 * 2, 18, 3)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_model", [False, True])
def test_counts_of_four_branches(way: str, with_model: bool, engine: LLMEngine) -> None:
    waves, settings, want = WAYS[way]
    run = serve(waves, config(**settings), engine if with_model else None)
    prompt_tokens = run.positions[-1] - 4 * (OUTPUT - 1)
    assert (run.references, run.blocks, prompt_tokens, run.copies) == want
    assert len(run.positions) == len(waves)


def test_every_way_gives_the_same_tokens(engine: LLMEngine) -> None:
    answers = []
    for waves, settings, _ in WAYS.values():
        run = serve(waves, config(**settings), engine)
        answers.append(sorted(tokens for name, lists in run.tokens.items() if "branch" in name for tokens in lists))
    assert len(answers[0]) == 4 and all(len(tokens) == OUTPUT for tokens in answers[0])
    assert answers.count(answers[0]) == len(WAYS)


def test_swap_and_recompute_in_a_small_pool(model: Path) -> None:
    engine = engine_of(model, preemption_mode="swap", swap_space_bytes=1 << 20)
    asked = [ask(f"r{i}", i, output=20, prompt=list(range(40 * i + 30, 40 * i + 46))) for i in range(3)]
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 16}
    roomy = serve([asked], config(**settings), engine)
    again = serve([asked], config(**settings, num_blocks=20), engine)
    swapped = serve([asked], config(**settings, num_blocks=20, preemption_mode="swap", num_host_blocks=20), engine)
    assert [run.stats.num_preemptions > 0 for run in (roomy, again, swapped)] == [False, True, True]
    assert again.positions[0] > roomy.positions[0] == swapped.positions[0] == 3 * 35
    assert swapped.stats.num_swapped_out_blocks == swapped.stats.num_swapped_in_blocks > 0
    assert roomy.tokens == again.tokens == swapped.tokens


@pytest.mark.parametrize("ahead", [False, True])
def test_a_cancel_in_two_moments(ahead: bool, model: Path) -> None:
    asked = [ask("A", output=30), ask("B", output=30, prompt=list(range(80, 81)))]
    run = cancel(engine_of(model, async_scheduling=ahead), config(enable_prefix_caching=False), asked, "A", 6)
    held = 6  # 18 + 6 tokens with a step in flight, 18 + 5 without one
    assert run.free_at_return - run.free_before == (0 if ahead else held)
    assert run.free_after - run.free_before == held
    assert 0 < run.returned_s < run.freed_s


def test_the_most_is_kept_and_waves_are_apart() -> None:
    run = serve(
        [[ask("long"), ask("other", prompt=[7])], [ask("short", output=1)]], config(enable_prefix_caching=False)
    )
    assert run.references == run.blocks == 6 + 2 and run.positions == [18 + 5 + 6, 18]


def test_an_engine_at_work_is_left_alone(model: Path) -> None:
    engine = engine_of(model)
    engine.add_request("mine", {"prompt_token_ids": PROMPT}, ask("").params)
    with pytest.raises(ValueError, match="still serves 1 requests"):
        serve([FOUR], config(), engine)


def test_the_engine_must_have_the_blocks(engine: LLMEngine) -> None:
    with pytest.raises(ValueError, match="config has 65 blocks of 4, the engine 64 of 4"):
        serve([], config(num_blocks=65), engine)
    with pytest.raises(ValueError, match="64 blocks of 8"):
        serve([], config(block_size=8), engine)


def test_repeats_must_agree_in_blocks() -> None:
    runs = iter([Cancelled(1, 5, 3, 3, 7), Cancelled(2, 9, 3, 3, 7), Cancelled(3, 6, 3, 3, 7)])
    assert repeated(lambda: next(runs), 3) == Cancelled(2, 6, 3, 3, 7)
    runs = iter([Cancelled(1, 5, 3, 3, 7), Cancelled(1, 5, 3, 4, 7)])
    with pytest.raises(ValueError, match="differ in their free blocks"):
        repeated(lambda: next(runs), 2)
