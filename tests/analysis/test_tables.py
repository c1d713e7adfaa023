"""The shipped tables, refusals, and what importing the package costs."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import mini_engine.analysis as analysis
from mini_engine.analysis import (
    BOOK_STEP,
    QWEN3_8B,
    RTX_PRO_6000,
    AnalysisError,
    Chunk,
    Hardware,
    get_hardware,
    get_link,
    get_model,
    hardware_names,
    link_names,
    model_names,
)
from mini_engine.analysis.tables import read_table

ASKED_FOR = [
    "rtx-pro-6000",
    "h100-sxm",
    "h200-sxm",
    "b200",
    "gb200",
    "gh200",
    "a100-sxm",
    "rtx-4090",
    "rtx-5090",
    "m2-max",
]


def test_the_cards_and_links_there_should_be() -> None:
    assert sorted(hardware_names()) == sorted(ASKED_FOR)
    assert {"pcie4-x16", "pcie5-x16", "nvlink-c2c-gh200", "nvlink-c2c-gb200"} <= set(link_names())


@pytest.mark.parametrize("name", hardware_names())
def test_a_card_has_sources_and_known_links(name: str) -> None:
    card = get_hardware(name)
    assert len(card.source) > 20 and card.title
    assert card.nominal_bytes <= card.memory_bytes < 1.08 * card.nominal_bytes  # GB on the box, GiB inside
    assert set(card.links) <= set(link_names())
    assert 1e11 < card.bandwidth < 1e13
    for name_of_type, factor in [("float8", 2), ("float4", 4)]:
        if name_of_type in card.peak_flops:
            assert card.peak(name_of_type) == pytest.approx(factor * card.peak("bfloat16"), rel=1e-3)


@pytest.mark.parametrize("name", ["b200", "gb200", "m2-max", "nvlink-c2c-gb200"])
def test_entries_with_only_marketing_figures_say_so(name: str) -> None:
    entry = get_link(name) if name in link_names() else get_hardware(name)
    assert "marketing figure" in entry.note


@pytest.mark.parametrize("name", link_names())
def test_a_link_counts_one_direction(name: str) -> None:
    link = get_link(name)
    assert link.source and link.seconds(link.bandwidth * 3) == pytest.approx(3)


def test_the_card_of_the_book() -> None:
    assert (RTX_PRO_6000.bandwidth, RTX_PRO_6000.peak(), RTX_PRO_6000.power_w) == (1792e9, 503.8e12, 600)
    assert RTX_PRO_6000.memory_bytes == 97_887 * 2**20


def test_a_card_measured_by_yourself() -> None:
    laptop = Hardware("laptop", bandwidth=12e9, peak_flops={"float32": 80e9})
    assert laptop.memory_bytes == 0 and analysis.ridge_point(laptop, "float32") == pytest.approx(80 / 12)


def test_models_have_sources() -> None:
    assert all(table["source"] for table in read_table("models").values())
    scaling = get_model("llama-3.1-8b").rope_scaling
    assert scaling is not None and scaling.original_max_position_embeddings == 8192
    assert {get_model(name).architecture for name in model_names()} == {"llama", "qwen3"}


REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("hardware 'h300' is not in the table, which has rtx-pro-6000, ", lambda: get_hardware("h300")),
    ("link 'usb' is not in the table", lambda: get_link("usb")),
    ("model 'gpt' is not in the table, which has qwen3-8b", lambda: get_model("gpt")),
    ("number format 'q9' is not one of float32", lambda: analysis.get_format("q9")),
    ("no peak of m2-max is known for bfloat16, only for: float32", lambda: get_hardware("m2-max").peak()),
    ("bandwidth must be a finite number above 0, got -1", lambda: Hardware("x", -1, {})),
    ("bandwidth must be a finite number above 0, got nan", lambda: Hardware("x", math.nan, {})),
    ("bandwidth must be a finite number above 0, got inf", lambda: Hardware("x", math.inf, {})),
    ("batch must be a whole number of at least 1, got 0", lambda: analysis.read_bytes_per_token(QWEN3_8B, 0, 10)),
    ("batch must be a whole number of at least 1, got 1.5", lambda: analysis.weight_intensity(1.5)),  # type: ignore
    ("context must be a whole number of at least 1", lambda: analysis.crossover_batch(QWEN3_8B, 0)),
    ("tokens must be a whole number of at least 0, got -1", lambda: analysis.kv_bytes(QWEN3_8B, -1)),
    ("output must be a whole number of at least 1", lambda: analysis.tokens_computed(5, 0)),
    ("block_size must be a whole number of at least 1", lambda: analysis.blocks_needed(5, 0)),
    ("history must be a whole number of at least 0", lambda: analysis.causal_pairs(5, -1)),
    ("new must be a whole number of at least 1", lambda: Chunk(0)),
    ("base_s must be a finite number of at least 0", lambda: analysis.FittedStep(-1, 0, 0)),
    ("base_s must be a finite number of at least 0, got inf", lambda: analysis.FittedStep(math.inf, 0, 0)),
    ("gap_s must be a finite number above 0", lambda: analysis.largest_chunk(BOOK_STEP.seconds, 0)),
    ("seconds must be a finite number above 0", lambda: analysis.mbu(1, 0, RTX_PRO_6000)),
    ("extra_seconds must be a finite number above 0", lambda: analysis.marginal_bandwidth((1, 2), (3, 3))),
    ("rank must be a whole number of at least 1", lambda: analysis.lora_bytes(QWEN3_8B, 0)),
    ("capacity must be a whole number of at least 0", lambda: analysis.Ledger(-1)),
    ("ttft_s must be a finite number above 0", lambda: analysis.Objective(ttft_s=0)),
    ("shape must be a whole number of at least 1", lambda: analysis.padded_rows(3, [0])),
    ("mfu must be a finite number above 0", lambda: analysis.seconds_at(analysis.StepTime(1, 1), mfu=0)),
]


@pytest.mark.parametrize("message, call", REFUSED, ids=[message for message, _ in REFUSED])
def test_questions_without_an_answer_are_refused_in_one_line(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(AnalysisError) as refusal:
        call()
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_numpy_integers_are_whole_numbers() -> None:
    """A notebook's np.arange of batches."""
    numpy = pytest.importorskip("numpy")
    reads = [analysis.read_bytes_per_token(QWEN3_8B, batch, 2048) for batch in numpy.array([1, 64])]
    assert reads == [analysis.read_bytes_per_token(QWEN3_8B, batch, 2048) for batch in (1, 64)]
    with pytest.raises(AnalysisError, match="whole number of at least 1, got True"):
        analysis.weight_intensity(True)


def test_everything_public_is_listed_and_there() -> None:
    assert all(hasattr(analysis, name) for name in analysis.__all__)
    assert len(set(analysis.__all__)) == len(analysis.__all__)


def test_importing_the_arithmetic_loads_neither_torch_nor_numpy() -> None:
    """What keeps it under 0.2 s: nothing heavier than the standard library, and little of that."""
    code = (
        "import sys; before = set(sys.modules); import mini_engine.analysis; print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    outside = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert outside == {"mini_engine"}
    assert not {"asyncio", "importlib.metadata", "unittest", "multiprocessing"} & set(loaded)
