"""Requests that fit, against blocks handed out one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.analysis import (
    BF16,
    Q4_0,
    Q8_0,
    QWEN3_8B,
    AnalysisError,
    GiB,
    block_bytes,
    blocks_needed,
    crossover_batch,
    group_blocks,
    group_kv_bytes,
    max_requests,
    pool_blocks,
    request_kv_bytes,
    shared_blocks,
)


def hand_out(requests: int, prompt: int, output: int, block: int, prefix: int) -> set[tuple[int, int]]:
    """Blocks that requests write token by token: (owner, logical block); owner −1 is the shared prefix."""
    blocks = set()
    for request in range(requests):
        for position in range(prompt + output - 1):  # the last output token is never computed
            logical = position // block
            block_end = (logical + 1) * block
            # Shared: a block all of whose tokens are in the prefix, and that leaves a prompt token to compute.
            shared = block_end <= prefix and block_end < prompt
            blocks.add((-1 if shared else request, logical))
    return blocks


SHAPES = {
    "prompt": st.integers(1, 40),
    "output": st.integers(1, 20),
    "block": st.integers(1, 9),
    "prefix": st.integers(0, 40),
}


@given(requests=st.integers(0, 5), **SHAPES)
def test_blocks_held(requests: int, prompt: int, output: int, block: int, prefix: int) -> None:
    prefix = min(prefix, prompt)
    held = hand_out(requests, prompt, output, block, prefix)
    assert group_blocks(requests, prompt, output, block, prefix) == len(held)
    assert group_kv_bytes(QWEN3_8B, requests, prompt, output, block, prefix) == len(held) * block * 147_456


@given(pool=st.integers(0, 60), spare=st.floats(0, 0.99), kv=st.sampled_from([BF16, Q8_0, Q4_0]), **SHAPES)
def test_most_requests_that_fit(
    pool: int, spare: float, kv: object, prompt: int, output: int, block: int, prefix: int
) -> None:
    assert kv is BF16 or kv is Q8_0 or kv is Q4_0
    prefix = min(prefix, prompt)
    one_block = block_bytes(QWEN3_8B, block, kv)
    pool_bytes = pool * one_block + int(spare * one_block)
    fit = 0
    while len(hand_out(fit + 1, prompt, output, block, prefix)) <= pool:
        fit += 1
    assert pool_blocks(QWEN3_8B, pool_bytes, block, kv) == pool
    assert max_requests(QWEN3_8B, pool_bytes, prompt, output, block, prefix, kv) == fit


def test_one_request() -> None:
    """Exercise of pitfall 1: 2048 in, 241 out is 2288 tokens, 143 blocks; counting all outputs gives 144."""
    assert request_kv_bytes(QWEN3_8B, 2048, 241) == 143 * block_bytes(QWEN3_8B)
    assert blocks_needed(2048 + 241) == 144


def test_a_prefix_is_shared_by_full_blocks() -> None:
    assert shared_blocks(prompt=200, shared_prefix=100) * 16 == 96


@pytest.mark.parametrize("prompt", [2048, 8192])
def test_exercise_8_1_capacity_binds_before_the_crossover(prompt: int) -> None:
    assert max_requests(QWEN3_8B, 12 * GiB, prompt, 256) < crossover_batch(QWEN3_8B, prompt)


def test_sharing_and_q8_0_together() -> None:
    """Pitfall 6: 16 long requests that share 6144 tokens, in q8_0: 3,213 MiB; and 35 of them fit in BF16 (8.3.2)."""
    assert group_kv_bytes(QWEN3_8B, 16, 8192, 256, shared_prefix=6144, kv=Q8_0) / 2**20 == 3213
    assert max_requests(QWEN3_8B, 12 * GiB, 8192, 256, shared_prefix=6144) == 35


def test_a_prefix_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(AnalysisError, match="a prompt of 100 tokens cannot share 101"):
        shared_blocks(100, 101)
