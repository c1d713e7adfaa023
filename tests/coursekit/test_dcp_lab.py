"""What lab 10-1 stands on: its model, its looks into pools and groups, its counts, its servers and its pictures."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coursekit.collectives import LARGE, MeasuredLink, measure_link
from coursekit.dcp_lab import (
    Cut,
    cuts,
    exchanges,
    find_tokens,
    most_running,
    most_running_without_model,
    shape_of,
    time_decode,
)
from coursekit.figures.rank_runs import room, steps_and_floors
from coursekit.served import client, served
from coursekit.tiny_model import byte_tokenizer, save_tiny_llama
from mini_engine import LLM, SamplingParams
from mini_engine.analysis.dcp import exchange_bytes, exchange_collectives, kv_bytes_per_token_per_rank
from mini_engine.analysis.formats import FP32
from mini_engine.config import SchedulerConfig

matplotlib = pytest.importorskip("matplotlib")

PLAIN: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "enable_prefix_caching": False}
POOL: dict[str, Any] = {"num_gpu_blocks_override": 65, **PLAIN}
THREADS: dict[str, Any] = {"tensor_parallel_size": 4, "distributed_executor_backend": "local"}
LAYERS, HEADS, WIDTH = 2, 8, 32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """By their KV heads."""
    directory = tmp_path_factory.mktemp("models")
    return {
        n: save_tiny_llama(directory / f"{n}", num_key_value_heads=n, num_hidden_layers=LAYERS, hidden_size=64)
        for n in (1, 2)
    }


@pytest.fixture(scope="module")
def alone(models: dict[int, str]) -> LLM:
    return LLM(models[1], **POOL)


def prompt(start: int, length: int) -> list[int]:
    return [(5 * start + 11 * j * j) % 256 for j in range(length)]


def words(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def test_the_model_is_the_same_wherever_it_is_made(models: dict[int, str], tmp_path: Path) -> None:
    again = save_tiny_llama(tmp_path / "a", num_hidden_layers=LAYERS, hidden_size=64)
    other = save_tiny_llama(tmp_path / "b", num_hidden_layers=LAYERS, hidden_size=64, seed=1)
    one, two, three = (load_file(f"{path}/model.safetensors") for path in (models[1], again, other))
    assert all(torch.equal(one[name], two[name]) for name in one) and one.keys() == two.keys()
    assert not torch.equal(one["lm_head.weight"], three["lm_head.weight"])


def test_transformers_reads_the_same_model(models: dict[int, str], alone: LLM) -> None:
    transformers = pytest.importorskip("transformers")
    ids = prompt(1, 40)
    reference = transformers.AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float32)
    want = reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, 40:].tolist()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert list(alone.generate([{"prompt_token_ids": ids}], params)[0].outputs[0].token_ids) == want
    assert len(set(want)) > 1, "a model that repeats one token proves little"


def test_a_token_a_byte() -> None:
    tokenizer, text = byte_tokenizer(), "Bún bò 🍜 2+2\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.get_vocab_size() == 256 and len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kv_heads, dcp", [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)])
def test_tokens_are_found_where_they_belong(models: dict[int, str], kv_heads: int, dcp: int) -> None:
    whole = LLM(models[kv_heads], **POOL)
    ranks = LLM(models[kv_heads], decode_context_parallel_size=dcp, **POOL, **THREADS)
    found = find_tokens(whole, ranks, prompt(2, 21))
    assert found == [(rank * kv_heads // 4, [p for p in range(21) if p % dcp == rank % dcp]) for rank in range(4)]
    assert not whole.engine.has_unfinished_requests()


def test_every_way_once() -> None:
    assert [cut.dcp for cut in cuts(1, 2, 4)] == [1, 2, 2, 2, 2, 4, 4, 4, 4]
    assert len(set(cuts(1, 2, 4))) == 9 and len({cut.title for cut in cuts(1, 2, 4)}) == 9
    assert Cut(4, "a2a", True).options == {
        "decode_context_parallel_size": 4,
        "dcp_comm_backend": "a2a",
        "dcp_q_replicate": True,
    }


@pytest.mark.parametrize("cut", [*cuts(1, 2), Cut(4, "a2a"), Cut(4, "ag_rs", True)], ids=lambda cut: cut.title)
def test_bytes_are_the_formulas(models: dict[int, str], cut: Cut) -> None:
    """The second load takes several steps to read its prompts, and the first of its requests decode meanwhile."""
    llm = LLM(models[1], **cut.options, **POOL, **THREADS, max_num_batched_tokens=96)
    for lengths in ((5, 9, 20), (90, 91, 92)):
        seen = exchanges(llm, [prompt(i, length) for i, length in enumerate(lengths)])
        heads = HEADS * cut.dcp // 4
        layer = exchange_bytes(cut.comm_backend, cut.q_replicate, cut.dcp, 3, heads, WIDTH, WIDTH, element_bytes=4)
        count = exchange_collectives(cut.comm_backend, cut.q_replicate)
        assert seen.context_bytes == LAYERS * layer * (cut.dcp > 1)
        assert len(seen.context) == LAYERS * count * (cut.dcp > 1)
        assert len(seen.tensor) == 2 * LAYERS + 2  # all-reduces, that of the embeddings, the gather of the logits
        # An all-reduce of [3, 64] in float32: three of four parts come in, twice; logits: three quarters of [3, 256].
        assert seen.tensor_bytes == (2 * LAYERS + 1) * 2 * 3 * (3 * 64 * 4 // 4) + 3 * (3 * 64 * 4)
        assert not llm.engine.has_unfinished_requests()


def test_only_steps_of_all_are_timed(models: dict[int, str]) -> None:
    llm = LLM(models[1], max_num_batched_tokens=48, **POOL)
    prompts = [prompt(i, 40) for i in range(3)]
    timed = time_decode(llm, prompts, output=8)
    assert [len(tokens) for tokens in timed.tokens] == [8, 8, 8]
    assert timed.step_s > 0 and timed.tokens_per_s == pytest.approx(3 / timed.step_s)
    for output in (1, 2):  # with 2 the last one decodes, when the others have ended
        with pytest.raises(ValueError, match="too few for 3 requests"):
            time_decode(llm, prompts, output)


@pytest.mark.parametrize("tp, dcp, most", [(1, 1, 3), (4, 1, 3), (4, 2, 6), (4, 4, 12)])
def test_room_is_counted(models: dict[int, str], alone: LLM, tp: int, dcp: int, most: int) -> None:
    """Requests of 60 + 5 - 1 = 64 tokens: 4 blocks of 16, 2 of 32, 1 of 64; of 13 blocks 12 hold tokens."""
    group: dict[str, Any] = {
        "tensor_parallel_size": tp,
        "decode_context_parallel_size": dcp,
        "distributed_executor_backend": "local",
    }
    per_block = 16 * 2 * LAYERS * WIDTH * 4
    llm = LLM(models[1], **group, **PLAIN, kv_cache_memory_bytes=13 * per_block, admission="reserve")
    assert most_running(llm, [prompt(i, 60) for i in range(14)], output=5) == most
    runner = llm.engine.runner
    tokens = runner.num_blocks * llm.engine.config.virtual_block_size
    assert runner.kv_bytes / tokens == kv_bytes_per_token_per_rank(shape_of(alone.engine.model_config), tp, dcp, FP32)
    config = llm.engine.scheduler.config
    assert most_running_without_model(config, requests=14, prompt=60, output=5) == most


def test_all_fit_in_a_large_pool() -> None:
    config = SchedulerConfig(num_blocks=1000, max_model_len=128, enable_prefix_caching=False)
    assert most_running_without_model(config, requests=7, prompt=60, output=5) == 7


@pytest.mark.slow
def test_a_link_is_measured_between_processes() -> None:
    link = measure_link(2)
    assert link.ranks == 2 and 0 < link.small_s < LARGE / link.bandwidth


def test_a_rank_receives_what_the_others_have() -> None:
    assert MeasuredLink.of(4, 0.001, 0.5) == (4, 0.001, 3 * LARGE / 0.5)


def test_a_link_that_cannot_be_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "rank 1: no such device")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="2 processes failed: rank 1: no such device"):
        measure_link(2)


class Started:
    """The processes that `served` starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.processes: list[subprocess.Popen[bytes]] = []
        start = subprocess.Popen

        def watched(*args, **options):
            self.processes.append(start(*args, **options))
            return self.processes[-1]

        monkeypatch.setattr(subprocess, "Popen", watched)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    yield Started(monkeypatch)


@pytest.mark.slow
def test_a_server_of_two_ranks_is_measured_and_ends(models: dict[int, str], started: Started) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    options = ["--model", models[1], "--served-model-name", "tiny", "--device", "cpu", "--max-model-len", "128"]
    options += ["--kv-cache-memory-bytes", f"{2**22}", "-tp", "2", "-dcp", "2", "--dcp-comm-backend", "a2a"]
    load = ["--num-prompts", "2", "--concurrency", "2", "--input-len", "20", "--output-len", "4", "--vocab-size", "256"]
    with served(options) as url:
        report = json.loads(client(url, *load, "--json"))
        with pytest.raises(RuntimeError, match="--concurrency"):
            client(url, "--num-prompts", "1", "--concurrency", "2")
    assert report["model"] == "tiny" and report["levels"][0]["output_tokens"] == 8
    assert started.processes[0].poll() is not None


def test_a_server_that_does_not_start_says_why(started: Started, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="did not start: mini-engine: .*no config.json"),
        served(["--model", str(tmp_path)]),
    ):
        pass
    assert started.processes[0].poll() is not None


def test_pictures_say_their_numbers() -> None:
    figure: Any = steps_and_floors(
        {"TP alone": 20.0, "dcp 2, a2a": 33.3}, {"TP alone": 9.0, "dcp 2, a2a": 12.0}, "title"
    )
    said = words(figure)
    assert {"20.0 ms, its collectives 9.0", "33.3 ms, its collectives 12.0", "dcp 2, a2a"} <= set(said)
    [axes] = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [20.0, 33.3]
    assert [line.get_xdata()[0] for line in axes.lines] == [9.0, 12.0]
    figure = room({"toy": {"TP 8": (1.0, 3), "TP 8 + DCP 8": (0.125, 27)}, "book": {"TP 8": (34.3, 36)}})
    assert {"1", "0.125", "3", "27", "34.3", "36", "toy", "book"} <= set(words(figure))
    assert [len(axes.patches) for axes in figure.axes] == [2, 2, 1, 1]


NOTEBOOK = Path(__file__).parents[2] / "labs" / "lab_10_1_decode_context_parallelism.ipynb"


def test_the_notebook_is_light_and_of_no_machine() -> None:
    text = NOTEBOOK.read_text("utf-8")
    assert len(text) < 300_000 and "/tmp/" not in text
    cells = json.loads(text)["cells"]
    assert all(len(cell["source"]) <= 22 for cell in cells if cell["cell_type"] == "code")
    shown = [json.dumps(cell["outputs"]) for cell in cells if any("show(" in line for line in cell["source"])]
    assert shown and all("img alt=" in output for output in shown)


def test_the_texts_of_the_notebook_hold() -> None:
    """The answers at its end, by the rules: blocks of 55, and who holds what with an interleave of 16. And what it says
    of its stored steps."""
    from mini_engine.context_shard import ContextShard

    assert [55 // math.ceil(511 / (16 * dcp)) for dcp in (1, 2, 4, 8)] == [1, 3, 6, 13]
    assert [55 // math.ceil(255 / (16 * dcp)) for dcp in (1, 8)] == [3, 27]
    assert [ContextShard(rank, 4, 16).local_length(24) for rank in range(4)] == [16, 8, 0, 0]
    assert [ContextShard(rank, 4).local_length(24) for rank in range(4)] == [6] * 4
    cells = {cell["id"]: cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]}
    lines = "".join(cells["steps-table"]["outputs"][0]["text"]).splitlines()[2:]
    more = {line[: -len(figures := line[26:])].strip(): float(figures.split()[3]) for line in lines}
    cheapest, dearest = more["dcp 4, a2a, q replicated"], more["dcp 4, ag_rs"]
    assert cheapest == min(value for name, value in more.items() if name.startswith("dcp 4"))
    assert dearest > 2 * cheapest > 0
