"""rms_norm, rope and swiglu against what the model does in torch."""

from __future__ import annotations

import pytest
import torch

from mini_engine.config import ModelConfig
from mini_engine.kernels.rms_norm import rms_norm, rms_norm_reference
from mini_engine.kernels.rope import rope, rope_reference
from mini_engine.kernels.swiglu import swiglu, swiglu_reference
from mini_engine.rotary import rotary_table

# Two roundings of the dtype; the interpreter truncates to bf16, which is one more.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2.4e-2}
DTYPES = list(TOLERANCE)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=TOLERANCE[want.dtype], rtol=TOLERANCE[want.dtype])


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 576), (2, 4096), (5, 1), (2, 4, 80), (1, 9, 64)])
def test_rms_norm(shape, dtype, device):
    x, weight = random(*shape, dtype=dtype, device=device), random(shape[-1], dtype=dtype, device=device)
    assert_near(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def test_rms_norm_of_a_zero_row_is_held_by_eps(device):
    x, weight = torch.zeros(2, 64, device=device), torch.ones(64, device=device)
    assert torch.equal(rms_norm(x, weight, 1e-6), x)


def test_rms_norm_of_heads_in_place(device):
    """QK-norm: some heads of the QKV product change, the others do not."""
    qkv, weight = random(3, 7, 64, dtype=torch.float32, device=device), random(64, dtype=torch.float32, device=device)
    before = qkv.clone()
    rms_norm(qkv[:, 1:4], weight, 1e-6, out=qkv[:, 1:4])
    assert_near(qkv[:, 1:4], rms_norm_reference(before[:, 1:4], weight, 1e-6))
    assert torch.equal(qkv[:, :1], before[:, :1]) and torch.equal(qkv[:, 4:], before[:, 4:])


def test_rms_norm_of_heads_that_lie_apart(device):
    x, weight = random(3, 8, 64, dtype=torch.float32, device=device), random(64, dtype=torch.float32, device=device)
    assert_near(rms_norm(x[:, ::2], weight, 1e-6), rms_norm_reference(x[:, ::2], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim", [(3, 64), (8, 80), (17, 128)])
def test_rope(heads, dim, dtype, device):
    config = ModelConfig("llama", 1, 64, 1, 1, dim, 64, 64, True)
    table = rotary_table(config, 40, dtype, device)
    positions = torch.tensor([39, 0, 7, 7], device=device)
    qkv = random(len(positions), heads + 2, dim, dtype=dtype, device=device)
    before = qkv.clone()
    assert rope(qkv[:, :heads], table, positions).data_ptr() == qkv.data_ptr()
    assert_near(qkv[:, :heads], rope_reference(before[:, :heads], table, positions))
    assert torch.equal(qkv[:, heads:], before[:, heads:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 1024, 1536])
def test_swiglu(n, dtype, device):
    gate_up = random(2, 2 * n, dtype=dtype, device=device) * 4
    assert_near(swiglu(gate_up), swiglu_reference(gate_up))


def test_swiglu_rounds_where_torch_rounds(device):
    """Without the rounding between the two operators about a third of the elements would differ in their last bit."""
    gate_up = random(4, 2000, dtype=torch.float16, device=device)
    assert (swiglu(gate_up) == swiglu_reference(gate_up)).float().mean() > 0.99


def test_swiglu_of_large_gates_stays_finite(device):
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 3.0, 5.0]], device=device)
    assert torch.equal(swiglu(gate_up), torch.tensor([[0.0, 3e4, 0.0]], device=device))
