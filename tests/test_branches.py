"""Four branches of one prompt, run by a model: what sharing saves in blocks, and what a warm cache saves in work.

Book 8.3.2: 416 references to 131 blocks (95 + 4 × 9) through the prefix cache, 128 (96 + 4 × 8) by forking. Cold and
warm branches hold the same blocks at their peak; only the prefill differs (the note of 8.3.2).
"""

from __future__ import annotations

from typing import Any

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.pool_view import view
from tests.builders import tiny_llama_dir

PROMPT = {"prompt_token_ids": [3 + i % 300 for i in range(1536)]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model"), max_position_embeddings=2048))


def branches(model: str, way: str) -> tuple[dict[str, int], list[list[int]]]:
    """References and blocks at their peak, positions computed for the branches, and the tokens of each branch."""
    llm = LLM(
        model,
        dtype="float32",
        num_gpu_blocks_override=500,
        max_num_batched_tokens=512,
        enable_prefix_caching=way != "off",
    )
    engine: Any = llm.engine
    one: dict[str, Any] = {"max_tokens": 128, "ignore_eos": True, "temperature": 1.0}
    if way == "warm":
        llm.generate(PROMPT, SamplingParams(max_tokens=1))
    before = engine.scheduler.stats.num_scheduled_tokens
    if way == "fork":
        records = [engine.add_request("r", PROMPT, SamplingParams(n=4, seed=1, **one))]
    else:
        records = [engine.add_request(str(i), PROMPT, SamplingParams(seed=1 + i, **one)) for i in range(4)]
    references = blocks = 0
    while engine.has_unfinished_requests():
        engine.step()
        now = view(engine.scheduler)
        references, blocks = max(references, now.num_references), max(blocks, now.num_used)
    engine.scheduler.check()
    computed = engine.scheduler.stats.num_scheduled_tokens - before
    counts = {"references": references, "blocks": blocks, "prefill": computed - 4 * 127}
    return counts, [output.token_ids for record in records for output in record.outputs]


def test_the_four_branches_of_the_book(model: str) -> None:
    counts, tokens = {}, {}
    for way in ("cold", "warm", "fork", "off"):
        counts[way], tokens[way] = branches(model, way)
    assert counts == {
        "cold": {"references": 416, "blocks": 131, "prefill": 1536 + 3 * 16},
        "warm": {"references": 416, "blocks": 131, "prefill": 4 * 16},
        "fork": {"references": 416, "blocks": 128, "prefill": 1536},
        "off": {"references": 416, "blocks": 416, "prefill": 4 * 1536},
    }
    assert tokens["cold"] == tokens["warm"] == tokens["fork"] == tokens["off"]
    assert len({tuple(each) for each in tokens["cold"]}) == 4
