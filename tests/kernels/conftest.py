"""Kernel tests run twice over: in Triton's interpreter on the CPU, and (marked `gpu`) compiled, on a GPU.

One process does one or the other: TRITON_INTERPRET is read when triton is first imported (tests/conftest.py sets it
where there is no GPU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels of this test run."""
    interpreted = bool(triton.knobs.runtime.interpret)
    if request.param == "cpu" and not interpreted:
        pytest.skip("kernels are compiled here; TRITON_INTERPRET=1 runs them in the interpreter")
    if request.param == "cuda" and interpreted:
        pytest.skip("TRITON_INTERPRET is set: kernels run in the interpreter")
    return torch.device(request.param)


@pytest.fixture
def interpreter() -> None:
    """For tests that look into the interpreter."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")


@pytest.fixture
def stored(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses that kernels write to, one array a store instruction and program."""
    from triton.runtime.interpreter import InterpreterBuilder

    addresses: list[Any] = []
    original = InterpreterBuilder.create_masked_store

    def watched(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses.append(ptrs.data[mask.data])
        return original(builder, ptrs, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", watched)
    return addresses


@pytest.fixture(autouse=True)
def unwritten(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Whatever a launcher allocates is NaN until a kernel writes it. The value is the real torch.empty."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    return empty
