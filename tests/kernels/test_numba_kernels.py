"""The CPU kernels against their torch references, with NaN wherever nobody may look."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from mini_engine import LLM, SamplingParams, numba_kernels, numba_ops
from mini_engine.errors import ConfigError
from mini_engine.kv_cache import KVCache
from mini_engine.numba_kernels import exp
from mini_engine.numba_ops import SPLIT, DecodeAttention, NumbaOps
from mini_engine.ops import TorchOps, make_ops, resolve_backend
from mini_engine.triton_ops import TritonOps
from tests.builders import tiny_deepseek_v2_dir, tiny_llama_dir, tiny_qwen3_dir
from tests.kernels.paged import Paged, make_paged

CPU = torch.device("cpu")
TORCH, NUMBA = TorchOps(), NumbaOps()


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_exp_over_all_it_is_used_for():
    @njit
    def of_all(x, out):
        for i in range(len(x)):
            out[i] = exp(x[i])

    x = np.linspace(-87, 88, 500_001).astype(np.float32)
    out = np.empty_like(x)
    of_all(x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out - exact) / exact) < 2e-7
    below = np.array([-88, -1e4, -np.inf], np.float32)
    of_all(below, out)
    assert (out[:3] < 2e-38).all() and (out[:3] >= 0).all()


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 7, 64, 576])
def test_rms_norm(rows: int, size: int):
    wide = torch.randn(rows, size + 3)
    for x in (
        torch.randn(rows, size) * 1e-3,
        wide[:, 2 : size + 2],
    ):  # so small that eps counts; rows of a wider matrix
        weight = torch.randn(size)
        close(NUMBA.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))


def qkv_heads(rows: int, heads: int, size: int) -> torch.Tensor:
    """The query and key heads of a QKV product, in which V's lie between two rows."""
    return torch.randn(rows, heads + 2, size)[:, :heads]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [8, 64, 80, 128])
def test_heads_are_normed_and_rotated_where_they_lie(rows: int, size: int):
    qk, (q_weight, k_weight) = qkv_heads(rows, 5, size), torch.randn(2, size)
    expected = TORCH.qk_norm(qk, q_weight, k_weight, 3, 1e-6)
    result = NUMBA.qk_norm(qk, q_weight, k_weight, 3, 1e-6)
    assert result.data_ptr() == qk.data_ptr()
    close(result, expected)

    positions, table = torch.tensor([9, 0, 30])[:rows], torch.randn(31, 2, size)
    expected = TORCH.rotary(table, positions)(qk)
    close(NUMBA.rotary(table, positions)(qk), expected)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("size", [1, 48, 1536])
def test_swiglu(rows: int, size: int):
    x = torch.randn(rows, 2 * size) * 20
    close(NUMBA.swiglu(x), TORCH.swiglu(x.clone()))


def cache_like(kv_heads: int, size: int, dtype: torch.dtype = torch.float32) -> Any:
    """As much of a KVCache as the kernels see: two layers of 6 blocks of 4."""
    k, v = (torch.full((2, 6, 4, kv_heads, size), float("nan"), dtype=dtype) for _ in range(2))
    return SimpleNamespace(k=k, v=v, layers=list(zip(k, v, strict=True)), is_latent=False, block_size=4)


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_write_stores_k_and_v_and_nothing_else(kv_heads: int):
    kv, slots = cache_like(kv_heads, 8), torch.tensor([23, 4, 0])
    qkv = torch.randn(3, 2 + 2 * kv_heads, 8)
    k, v = qkv[:, 2 : 2 + kv_heads], qkv[:, 2 + kv_heads :]
    NUMBA.write(kv, 1, k, v, slots)
    for new, pool in ((k, kv.k), (v, kv.v)):
        assert torch.equal(pool[1].flatten(0, 1)[slots], new)
        assert pool.isnan().sum() == pool.numel() - new.numel()


def test_heads_that_do_not_lie_side_by_side():
    """Not what the kernels read: torch's way, or a copy."""
    x = torch.randn(4, 3, 8).transpose(0, 1)  # [3, 4, 8]
    weights, positions, table = torch.randn(2, 8), torch.tensor([2, 0, 5]), torch.randn(6, 2, 8)
    close(NUMBA.qk_norm(x, *weights, 2, 1e-6), TORCH.qk_norm(x, *weights, 2, 1e-6))
    close(NUMBA.rotary(table, positions)(x), TORCH.rotary(table, positions)(x))
    kv, slots = cache_like(4, 8), torch.tensor([9, 2, 20])
    kv.write = KVCache.write.__get__(kv)
    kv._slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in kv.layers]
    NUMBA.write(kv, 0, x, -x, slots)
    assert torch.equal(kv.k[0].flatten(0, 1)[slots], x) and torch.equal(kv.v[0].flatten(0, 1)[slots], -x)

    paged = make_paged((1,) * 3, (3, 9, 0), CPU, group=4)
    spread = replace(paged, q=paged.q.transpose(0, 1).contiguous().transpose(0, 1))
    close(attend(spread).out, paged.reference.out, 1e-5)


def attend(paged: Paged, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> DecodeAttention:
    """The kernel, called once."""
    k, v = (paged.k_cache, paged.v_cache) if k is None or v is None else (k, v)
    kv: Any = SimpleNamespace(layers=[(k, v)])
    attention = DecodeAttention(replace(paged.batch, num_decodes=len(paged.batch.query_lens)), kv, paged.scale)
    attention(0, paged.q)
    return attention


@pytest.fixture(params=["threads", "one thread"])
def openmp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    here = request.param == "threads"
    monkeypatch.setattr(numba_ops, "_has_openmp", lambda: here)
    return here


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("size", [8, 64, 80, 128])
def test_decode_attention(group: int, size: int, openmp: bool):
    for block_size in (1, 4, 16):
        contexts = (0, block_size - 1, block_size, 2 * block_size - 1, 41)
        paged = make_paged((1,) * 5, contexts, CPU, group=group, kv_heads=2, dim=size, block_size=block_size)
        attention, expected = attend(paged), paged.reference
        close(attention.out, expected.out, 1e-5)
        close(attention.lses, expected.lse, 1e-5)  # one split each


@pytest.mark.parametrize("block_size", [16, 48])  # the second: splits that begin within a block
def test_long_contexts_are_cut_and_merged(block_size: int, openmp: bool):
    """Around the ends of splits, and beside sequences of another length."""
    contexts = (SPLIT - 2, SPLIT - 1, SPLIT, 3 * SPLIT + 5, 0)
    paged = make_paged((1,) * 5, contexts, CPU, group=3, kv_heads=2, block_size=block_size)
    attention = attend(paged)
    assert np.diff(attention.firsts).tolist() == [1, 1, 2, 4, 1]
    close(attention.out, paged.reference.out, 1e-5)


def test_a_split_of_no_weight_is_no_trouble():
    """Its scores lie so far below those of the others that e^x of the difference is 0."""
    paged = make_paged((1,), (2 * SPLIT - 1,), CPU, group=1)
    q, far = paged.q[0, 0], int(paged.batch.block_table[0, 0])
    paged.k_cache[far] = 1e3 * q  # the first block has it all, or nothing
    close(attend(paged).out, paged.reference.out, 1e-5)
    paged.k_cache[paged.batch.block_table[0, : SPLIT // 16].long()] = -1e3 * q
    close(attend(paged).out, paged.reference.out, 1e-5)


def test_a_sequence_does_not_depend_on_its_batch_mates(openmp: bool):
    paged = make_paged((1,) * 3, (300, 5, 16), CPU, group=3)
    together = attend(paged).out
    for row in range(3):
        alone = attend(paged.slice(row))
        assert torch.equal(alone.out[0], together[row])
        # Numba compiles each kernel by itself: what one rounds up, the other may round down.
        assert (alone.kernel is numba_kernels.decode_attention_parallel) == openmp


def test_large_scores_do_not_overflow():
    paged = make_paged((1,), (40,), CPU)
    paged.q.mul_(1e3)
    close(attend(paged).out, paged.reference.out, 1e-4)


def test_a_block_whose_offset_takes_more_than_32_bits():
    """Pages that are never touched take no memory: a pool of 2^31 numbers and a little."""
    paged = make_paged((1,), (20,), CPU, dim=64, block_size=16)
    far = 2**31 // (16 * 64) + 1
    table = paged.batch.block_table + far
    caches = []
    for cache in (paged.k_cache, paged.v_cache):
        pool = torch.from_numpy(np.zeros(((far + len(cache)) * 16, 1, 64), np.float32)).view(-1, 16, 1, 64)
        pool[far:] = cache
        caches.append(pool)
    moved = replace(paged, batch=replace(paged.batch, block_table=table))
    close(attend(moved, *caches).out, paged.reference.out, 1e-5)


def test_threads_may_use_it_at_once():
    """As the ranks of one process do."""
    cases = [make_paged((1,) * 6, tuple(range(i, i + 60, 10)), CPU, seed=i) for i in range(4)]
    expected = [attend(paged).out for paged in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            for out, want in zip(pool.map(lambda paged: attend(paged).out, cases), expected, strict=True):
                assert torch.equal(out, want)


@pytest.mark.parametrize("news, contexts", [((1, 1, 5), (9, 20, 8)), ((1, 3), (7, 0)), ((4,), (0,)), ((1, 1), (3, 4))])
def test_chunks_go_behind_the_decodes(news: tuple[int, ...], contexts: tuple[int, ...]):
    paged = make_paged(news, contexts, CPU, block_size=4, group=2)
    unread = torch.zeros(sum(news), dtype=torch.int64)
    batch = replace(paged.batch, num_decodes=news.count(1), input_ids=unread, positions=unread, slot_mapping=unread)
    k, v = paged.k_cache, paged.v_cache
    kv: Any = SimpleNamespace(k=k, v=v, layers=[(k, v)], block_size=4)
    attention = NUMBA.attention(batch, kv, paged.scale, torch.float32)
    assert isinstance(attention, DecodeAttention) == (set(news) == {1})
    close(attention(0, paged.q), paged.reference.out, 1e-5)


@pytest.mark.parametrize("build", [tiny_llama_dir, tiny_qwen3_dir, tiny_deepseek_v2_dir])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "bfloat16"}], ids=str)
def test_same_tokens_as_torch(build: Any, options: dict[str, Any], tmp_path: Path):
    prompts: Any = [{"prompt_token_ids": list(range(i, i + 9 * i))} for i in range(1, 6)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    model, tokens = str(build(tmp_path)), []
    for backend in ("numba", "torch"):
        llm = LLM(model, attention_backend=backend, **{"dtype": "float32", "max_num_batched_tokens": 24, **options})
        tokens.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert tokens[0] == tokens[1]


def test_backends_are_chosen_by_device(monkeypatch: pytest.MonkeyPatch):
    assert type(make_ops("auto", CPU)) is NumbaOps
    assert type(make_ops("torch", CPU)) is TorchOps
    assert type(make_ops("auto", torch.device("cuda"))) is TritonOps
    assert type(make_ops("torch", torch.device("cuda"))) is TorchOps
    with pytest.raises(ConfigError, match="'numba' is for a CPU, this engine runs on cuda"):
        make_ops("numba", torch.device("cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_backend("auto", CPU) == "torch"
    with pytest.raises(ConfigError, match="'numba' needs the numba package: install it, or use 'torch' or 'auto'"):
        make_ops("numba", CPU)


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_as_torch_was_told(threads: int):
    """Numba would let OpenMP, and so torch, use all cores again: on a busy machine they wait for each other."""
    code = (
        f"import torch; torch.set_num_threads({threads}); torch.get_num_threads(); import numba\n"
        "from mini_engine import numba_decoder\n"
        f"numba.set_num_threads(1); assert torch.get_num_threads() == {threads}, torch.get_num_threads()"
    )
    environment = {**os.environ, "NUMBA_NUM_THREADS": "3"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
