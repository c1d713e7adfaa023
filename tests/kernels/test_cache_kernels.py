"""Writing into the paged cache and copying its blocks: exact, and nothing else may change."""

from __future__ import annotations

import pytest
import torch

from mini_engine.kernels.checks import KernelInputError
from mini_engine.kernels.copy_blocks import copy_blocks, copy_blocks_reference
from mini_engine.kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_caches(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads, dim, block_size", [(2, 64, 16), (1, 80, 4), (3, 128, 12)])
def test_reshape_and_cache(dtype, kv_heads, dim, block_size, device):
    """Rows of the QKV product, one layer of the cache; slots below 0 (padding, other ranks) are left out."""
    slots = torch.tensor([3 * block_size, 5, -1, 2 * block_size - 1, block_size, -7], device=device)
    qkv = torch.randn(len(slots), 3 + 2 * kv_heads, dim).to(dtype).to(device)
    k, v = qkv[:, 3 : 3 + kv_heads], qkv[:, 3 + kv_heads :]
    caches = make_caches((2, 5, block_size, kv_heads, dim), dtype, device)
    wanted = [cache.clone() for cache in caches]
    reshape_and_cache(k, v, caches[0][1], caches[1][1], slots)
    reshape_and_cache_reference(k, v, wanted[0][1], wanted[1][1], slots)
    assert all(torch.equal(cache, want) for cache, want in zip(caches, wanted, strict=True))


def test_reshape_and_cache_beyond_32_bit_offsets(device, unwritten):
    block_size, dim = 16, 64
    far = 2**31 // (block_size * dim) + 1
    k_cache, v_cache = (unwritten(far + 1, block_size, 1, dim, dtype=torch.float16, device=device) for _ in range(2))
    k, v = torch.randn(2, 1, 1, dim).half().to(device).unbind(0)
    reshape_and_cache(k, v, k_cache, v_cache, torch.tensor([far * block_size + 3], device=device))
    assert torch.equal(k_cache[far, 3], k[0]) and torch.equal(v_cache[far, 3], v[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 6, 16, 2, 64), (1, 6, 16, 3, 80), (3, 6, 4, 1, 80)])
def test_copy_blocks(dtype, shape, device):
    """Blocks of less than a piece, of a whole number of pieces, and of one and a bit; one source for two copies."""
    copies = [(1, 3), (5, 2), (1, 4)]
    caches = make_caches(shape, dtype, device)
    wanted = [cache.clone() for cache in caches]
    copy_blocks(*caches, copies)
    copy_blocks_reference(*wanted, copies)
    assert all(torch.equal(cache, want) for cache, want in zip(caches, wanted, strict=True))


def test_copy_blocks_beyond_32_bit_offsets(device, unwritten):
    block_size, dim = 16, 64
    far = 2**31 // (block_size * dim) + 1
    caches = [unwritten(1, far + 1, block_size, 1, dim, dtype=torch.float16, device=device) for _ in range(2)]
    for cache in caches:
        cache[0, 1] = 1.0
        cache[0, far] = 2.0
    copy_blocks(*caches, [(far, 1)])
    assert all(bool((cache[0, 1] == 2.0).all()) for cache in caches)


@pytest.mark.parametrize(
    "copies, says",
    [
        ([(1, 2), (2, 3)], "block 2"),  # a chain: all copies run at once
        ([(1, 3), (2, 3)], "block 3"),
        ([(2, 2)], "block 2"),
        ([(1, 6)], "0 to 5"),
        ([(-1, 2)], "0 to 5"),
    ],
)
def test_copies_that_would_race_are_refused(copies, says):
    caches = make_caches((1, 6, 4, 1, 16), torch.float32, torch.device("cpu"))
    with pytest.raises(KernelInputError, match=says):
        copy_blocks(*caches, copies)


def test_no_copies_is_no_launch():
    copy_blocks(*make_caches((1, 6, 4, 1, 16), torch.float32, torch.device("cpu")), [])
