"""What launchers refuse, and that they never look at a value on the device."""

from __future__ import annotations

import pytest
import torch

from mini_engine.kernels.checks import KernelInputError
from mini_engine.kernels.merge import merge_states
from mini_engine.kernels.paged_attention import paged_attention
from mini_engine.kernels.reshape_and_cache import reshape_and_cache
from mini_engine.kernels.rms_norm import MAX_ROW, rms_norm
from mini_engine.kernels.rope import rope
from mini_engine.kernels.swiglu import swiglu
from tests.kernels.paged import make_paged

CPU = torch.device("cpu")
INT32 = torch.int32


def store_into_pool(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    k, pool = torch.zeros(tokens, 1, 8), torch.zeros(4, 4, 1, 8)
    return k, k, pool, pool


def attention(**changes: object) -> object:
    case = make_paged((1, 1), (5, 20), CPU)
    arguments: dict = {
        "q": case.q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "query_start_loc": case.batch.query_start_loc,
        "seq_lens": case.batch.seq_lens,
        "block_table": case.batch.block_table,
        **changes,
    }
    return paged_attention(**arguments, scale=case.scale, max_query_len=1, max_seq_len=21)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"q": torch.zeros(2, 4, 32)}, "k_cache must have shape"),
        ({"q": torch.zeros(2, 4, 64).double()}, "q must be torch.float32 or torch.float16 or torch.bfloat16"),
        ({"v_cache": torch.zeros(8, 16, 1, 64).half()}, "v_cache must be torch.float32, got torch.float16"),
        ({"q": torch.zeros(2, 64, 4).transpose(1, 2)}, "q must be contiguous in its last"),
        ({"v_cache": torch.zeros(8, 8, 1, 64)}, "v_cache must have shape"),
        ({"query_start_loc": torch.zeros(2, dtype=INT32)}, r"query_start_loc must have shape \[3\]"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens must be torch.int32"),
        ({"block_table": torch.zeros(3, 2, dtype=INT32)}, r"block_table must have shape \[2, any\]"),
        ({"out": torch.zeros(2, 4, 32)}, r"out must have shape \[2, 4, 64\]"),
        ({"lse": torch.zeros(2, 4).half()}, "lse must be torch.float32"),
    ],
)
def test_paged_attention_refuses(changes, says):
    with pytest.raises(KernelInputError, match=says):
        attention(**changes)


def test_heads_must_be_shared_evenly():
    case = make_paged((1,), (5,), CPU, group=3, kv_heads=2)
    with pytest.raises(KernelInputError, match="5 query heads cannot be shared out evenly over 2 KV heads"):
        attention(q=case.q[:, :5], k_cache=case.k_cache, v_cache=case.v_cache)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: rms_norm(torch.zeros(2, MAX_ROW + 1), torch.zeros(MAX_ROW + 1), 1e-6), "with N up to"),
        (lambda: rms_norm(torch.zeros(2, 8), torch.zeros(8).half(), 1e-6), "weight must be torch.float32"),
        (lambda: swiglu(torch.zeros(2, 7)), r"\[T, 2 \* N\], got \[2, 7\]"),
        (lambda: rope(torch.zeros(1, 1, 7), torch.zeros(4, 2, 7), torch.zeros(1).long()), "even head size, got 7"),
        (
            lambda: rope(torch.zeros(1, 1, 8), torch.zeros(4, 2, 8), torch.zeros(1, dtype=INT32)),
            "positions must be torch.int64",
        ),
        (lambda: merge_states(torch.zeros(2, 1, 1, 8).half(), torch.zeros(2, 1, 1)), "outs must be torch.float32"),
        (
            lambda: reshape_and_cache(*store_into_pool(1), torch.zeros(1, dtype=INT32)),
            "slot_mapping must be torch.int64",
        ),
    ],
)
def test_others_refuse(call, says):
    with pytest.raises(KernelInputError, match=says):
        call()


def test_nothing_to_do_is_no_launch():
    """A grid of 0 programs is an error on a GPU."""
    assert rms_norm(torch.zeros(0, 8), torch.zeros(8), 1e-6).shape == (0, 8)
    assert swiglu(torch.zeros(0, 8)).shape == (0, 4)
    assert merge_states(torch.zeros(2, 0, 1, 8), torch.zeros(2, 0, 1)).out.shape == (0, 1, 8)
    reshape_and_cache(*store_into_pool(0), torch.zeros(0).long())
    assert rope(torch.zeros(0, 1, 8), torch.zeros(4, 2, 8), torch.zeros(0).long()).shape == (0, 1, 8)
