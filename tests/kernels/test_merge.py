"""The merge of attention states against attention over all keys at once."""

from __future__ import annotations

import math

import pytest
import torch

from mini_engine.attention import attend
from mini_engine.kernels.merge import merge_reference, merge_states

NAN, INF = float("nan"), float("inf")


def random_states(parts: int, device: torch.device, dim: int = 80, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(parts, 3, 2, dim, generator=generator)
    lses = torch.randn(parts, 3, 2, generator=generator) * 5
    return outs.to(device), lses.to(device)


@pytest.mark.parametrize("parts", [1, 2, 7, 8])
def test_against_the_pairwise_merge(parts, device):
    outs, lses = random_states(parts, device)
    got, want = merge_states(outs, lses), merge_reference(outs, lses)
    torch.testing.assert_close(got.out, want.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-5)


def test_pieces_give_attention_over_all_keys(device):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 64), torch.randn(2, 50, 64), torch.randn(2, 50, 64)
    cuts = [(0, 10), (10, 11), (11, 50)]
    states = [attend(q, k[:, a:b], v[:, a:b], 0.125) for a, b in cuts]
    outs = torch.stack([state.out.transpose(0, 1) for state in states]).contiguous().to(device)
    lses = torch.stack([state.lse.transpose(0, 1) for state in states]).contiguous().to(device)
    got, want = merge_states(outs, lses), attend(q, k, v, 0.125)
    torch.testing.assert_close(got.out.transpose(0, 1).cpu(), want.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.lse.transpose(0, 1).cpu(), want.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lse", [-INF, INF, NAN])
def test_empty_parts_are_not_looked_at(lse, device):
    """Their out was never written."""
    outs, lses = random_states(3, device)
    outs[1], lses[1] = NAN, lse
    got, want = merge_states(outs, lses), merge_reference(outs[::2], lses[::2])
    torch.testing.assert_close(got.out, want.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-5)


def test_all_parts_empty(device):
    outs, lses = torch.full((2, 3, 2, 64), NAN, device=device), torch.full((2, 3, 2), -INF, device=device)
    got = merge_states(outs, lses)
    assert torch.equal(got.out, torch.zeros_like(got.out))
    assert torch.equal(got.lse, torch.full_like(got.lse, -INF))


@pytest.mark.parametrize("level", [-1000.0, 0.0, 1000.0])
def test_large_scores_neither_overflow_nor_vanish(level, device):
    outs, _ = random_states(2, device)
    outs[0], outs[1] = 3e38, 1e38
    got = merge_states(outs, torch.full((2, 3, 2), level, device=device))
    torch.testing.assert_close(got.out, torch.full_like(got.out, 2e38))
    torch.testing.assert_close(got.lse, torch.full_like(got.lse, level + math.log(2)))


def test_one_part_comes_back_to_the_bit(device):
    """So that a sequence in one split gives the same whether or not its neighbours need more."""
    outs, lses = random_states(4, device)
    outs[1:], lses[1:] = NAN, -INF
    got = merge_states(outs, lses)
    assert torch.equal(got.out, outs[0])
    assert torch.equal(got.lse, lses[0])
