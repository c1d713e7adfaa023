"""`mini-engine bench`: that it measures what it says, on a tiny model. Seconds are not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mini_engine import LLM, EngineConfig, SamplingParams
from mini_engine.bench import measure, rows
from mini_engine.bench.ledger import ledger
from mini_engine.bench.peers import transformers_twin
from mini_engine.errors import ConfigError
from tests.builders import LLAMA3_SCALING, tiny_llama_dir, tiny_qwen3_dir, to_gguf


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tiny_llama_dir(tmp_path_factory.mktemp("model"))
    return measure.run(EngineConfig(str(path)), input_len=8, output_len=6, repeats=1)


def test_every_figure_has_value_unit_and_how(report: dict) -> None:
    names = [row["name"] for row in report["figures"]]
    assert names == [
        "start to first token",
        "memory above import torch",
        "scheduler, 1 running",
        "scheduler, 64 running",
        "scheduler, 256 running",
        "read rate",
        "decode, batch 1",
        "decode, batch 16",
        "prefill",
        "whole requests, batch 1",
        "whole requests, batch 16",
    ]
    assert all(row["unit"] and row["how"] for row in report["figures"])
    # A tiny model may fit into what importing torch freed again.
    assert all(row["value"] > 0 for row in report["figures"] if row["name"] != "memory above import torch")
    assert json.loads(json.dumps(report)) == report


def test_ratios_belong_to_their_figures(report: dict) -> None:
    figures = {row["name"]: row for row in report["figures"]}
    for name in ("decode, batch 1", "decode, batch 16"):
        assert figures[name]["share_of_bound"] == pytest.approx(figures[name]["value"] / figures[name]["bound"])
    for name in ("whole requests, batch 1", "whole requests, batch 16"):
        # one run each: the ratio of the medians is the median of the ratios
        assert figures[name]["ratio_to_peer"] == pytest.approx(figures[name]["value"] / figures[name]["peer"])


def test_a_share_above_one_is_never_worse() -> None:
    assert rows.row("rate", 3.0, "GB/s", "", bound=4.0)["share_of_bound"] == 0.75
    slow = rows.row("step", 4.0, "ms", "", bound=3.0, peer=("other", 6.0), less_is_better=True)
    assert slow["share_of_bound"] == 0.75 and slow["ratio_to_peer"] == 1.5


def test_the_ledger_holds_every_figure_with_its_origin(report: dict, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(report))
    (tmp_path / "tried.toml").write_text('[[tried]]\nwhat = "spinning"\nfigure = "1.00 x"\nverdict = "left out"\n')
    text = ledger(tmp_path)
    assert report["machine"]["device"] in text and report["date"] in text and str(report["commit"]) in text
    for row in report["figures"]:
        assert f"| {row['name']} |" in text and row["how"] in text
    assert "| spinning | 1.00 x | left out |" in text


def test_the_ledger_refuses_what_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no report"):
        ledger(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match="a.json is not a bench report"):
        ledger(tmp_path)


def test_the_committed_ledger_is_that_of_the_committed_reports() -> None:
    docs = Path(__file__).parent.parent / "docs"
    assert (docs / "performance.md").read_text() == ledger(docs / "bench")


def test_the_table_shows_every_figure(report: dict) -> None:
    text = rows.table(report)
    for row in report["figures"]:
        assert row["name"] in text
    assert "x transformers" in text and "of the bound" in text


@pytest.mark.parametrize("build", [tiny_llama_dir, tiny_qwen3_dir])
def test_the_peer_computes_the_same_model(build, tmp_path: Path) -> None:
    overrides = {"rope_scaling": LLAMA3_SCALING} if build is tiny_llama_dir else {"tie_word_embeddings": True}
    llm = LLM(str(build(tmp_path, **overrides)), dtype="float32")
    twin = transformers_twin(llm.engine.runner.model)
    prompt = list(range(10, 50))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    ours = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert twin.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, 40:].tolist() == ours
    assert twin.model.embed_tokens.weight.data_ptr() == llm.engine.runner.model.embedding.data_ptr()


def test_transformers_computes_in_the_dtype_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 4-bit weights have a bfloat16 twin instead of a float32 one."""
    monkeypatch.setattr("mini_engine.linear.has_amx", lambda: True)
    llm = LLM(str(to_gguf(tiny_llama_dir(tmp_path), tmp_path / "q4.gguf", "Q4_1")), device="cpu")
    assert llm.engine.runner.model.layers[0].qkv.weight.dtype == torch.bfloat16
    twin = transformers_twin(llm.engine.runner.model)
    assert {tensor.dtype for tensor in twin.parameters()} == {torch.float32}
