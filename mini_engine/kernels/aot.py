"""Ahead of time: compile exactly what a launcher would launch, on a machine without a GPU.

The launcher is called with tensors on torch's "meta" device, which have shapes and types and no memory; the call it
makes is kept instead of run, and compiled for any architecture. So a gate judges the tiles, warps and alignments that
are really used, at the size of an 8B model, on a laptop. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction, mangle_type

from mini_engine.errors import EngineError

OPTIONS = ("num_warps", "num_stages", "maxnreg")
ALIGNMENT = 16  # bytes; the allocator gives more


@dataclass(frozen=True)
class LaunchRecord:
    """One call of a kernel: its arguments by name, its grid, its options."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def programs(self) -> int:
        count = 1
        for size in self.grid:
            count *= size
        return count


@contextmanager
def _recording(kernels: set[JITFunction], records: list[LaunchRecord]) -> Iterator[None]:
    """While open, the kernels note their calls in `records` instead of running them."""

    def recorder(kernel: JITFunction) -> Callable[..., None]:
        def run(*args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            arguments = dict(kernel.signature.bind(*args, **kwargs).arguments)
            records.append(LaunchRecord(kernel, grid, arguments, options))

        return run

    for kernel in kernels:
        kernel.run = recorder(kernel)
    try:
        yield
    finally:
        for kernel in kernels:
            del kernel.run


def record(call: Callable[[], Any], *kernels: JITFunction) -> list[LaunchRecord]:
    """The launches of `kernels` that `call` makes. Raises EngineError where Triton's interpreter is on."""
    if triton.knobs.runtime.interpret:
        raise EngineError("TRITON_INTERPRET is set: kernels can be compiled only in a process started without it")
    records: list[LaunchRecord] = []
    with _recording(set(kernels), records):
        call()
    return records


def compile_launch(launch: LaunchRecord, capability: int) -> CompiledKernel:
    """The kernel as it would be compiled for that launch. capability: 90 for sm_90."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, param in enumerate(launch.kernel.params):
        value = launch.arguments[param.name]
        # As triton's own launch specialises: 1 becomes a constant, multiples of 16 are noted.
        if param.is_constexpr or value is None or (_is_int(value) and value == 1 and not param.do_not_specialize):
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        signature[param.name] = mangle_type(value)
        aligned = not (param.do_not_specialize or param.do_not_specialize_on_alignment)
        address = value if _is_int(value) else value.data_ptr() if hasattr(value, "data_ptr") else 1
        if aligned and address % ALIGNMENT == 0:
            attributes[(i,)] = [["tt.divisibility", ALIGNMENT]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
