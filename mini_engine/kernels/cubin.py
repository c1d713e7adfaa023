"""Read the machine code of a compiled kernel: what it takes of an SM, and what its main loop is made of.

The main loop is the innermost loop that holds a tensor-core instruction; a kernel without one is looked at as a whole.
The tools, cuobjdump and nvdisasm, come with triton. Names of instructions: NVIDIA's "CUDA Binary Utilities".

    LDG, LDGSTS, UTMALDG   load to registers; copy to shared memory in the background; the same by the TMA unit
    STL, LDL               spilled registers going to memory and back
    HMMA, HGMMA, UTCHMMA   tensor cores: of a warp (sm_80, sm_120), of four warps (sm_90), of a block (sm_100)
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.compiler import CompiledKernel

from mini_engine.errors import EngineError

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)$")
LABEL = re.compile(r"^(\.L_x_\d+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
MMA = ("HMMA", "HGMMA", "UTCHMMA")
ASYNC = ("LDGSTS", "UTMALDG")
HGMMA_SHAPE = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)")
HMMA_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8)}


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def load_width(self) -> int | None:
        """Bytes a thread loads from global memory at once; None for anything else."""
        if self.name not in ("LDG", "LDGSTS"):
            return None
        parts = self.opcode.split(".")[1:]
        for suffix, width in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
            if suffix in parts:
                return width
        return 4


@dataclass(frozen=True)
class Cubin:
    """registers a thread; spill_bytes a thread; shared_bytes a block; the instructions of the main loop."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    spill_instructions: int
    has_main_loop: bool
    main: tuple[Instruction, ...]

    @property
    def load_widths(self) -> dict[int, int]:
        """Bytes a thread loads at once -> how many such loads the main loop has, async copies included."""
        widths = Counter(item.load_width for item in self.main)
        return {width: widths[width] for width in sorted(w for w in widths if w is not None)}

    @property
    def mma(self) -> dict[str, int]:
        """Tensor-core opcodes -> how often they stand in the main loop."""
        return dict(Counter(item.opcode for item in self.main if item.name in MMA))

    @property
    def async_copies(self) -> int:
        return sum(item.name in ASYNC for item in self.main)

    @property
    def mma_flops(self) -> int | None:
        """FLOPs that one run of the main loop asks of the tensor cores, over all warps; None if the code hides it."""
        total = 0
        for opcode, count in self.mma.items():
            flops = _flops(opcode, self.num_warps)
            if flops is None:
                return None
            total += flops * count
        return total


def read_cubin(compiled: CompiledKernel) -> Cubin:
    """Disassemble. Raises EngineError where triton's tools are missing or say nothing."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        resources = RESOURCES.search(_tool("cuobjdump", "-res-usage", str(path)))
        code = _tool("nvdisasm", "-c", str(path))
    if resources is None:
        raise EngineError("cuobjdump reports no registers for this kernel: its output has changed")
    lines = _parse(code)
    loop = main_loop(lines)
    instructions = [line for line in lines if isinstance(line, Instruction)]
    return Cubin(
        registers=int(resources[1]),
        spill_bytes=int(resources[2]),
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        spill_instructions=sum(item.name in ("STL", "LDL") for item in instructions),
        has_main_loop=loop is not None,
        main=tuple(instructions if loop is None else loop),
    )


def main_loop(lines: list[str | Instruction]) -> list[Instruction] | None:
    """The shortest stretch from a label to a branch back to it that holds a tensor-core instruction.

    lines: labels (text) and instructions, in order.
    """
    places = {line: i for i, line in enumerate(lines) if isinstance(line, str)}
    found: list[Instruction] | None = None
    for i, line in enumerate(lines):
        if not isinstance(line, Instruction) or line.name != "BRA":
            continue
        target = TARGET.search(line.operands)
        if target is None or places.get(target[1], i) >= i:
            continue
        body = [item for item in lines[places[target[1]] : i + 1] if isinstance(item, Instruction)]
        if any(item.name in MMA for item in body) and (found is None or len(body) < len(found)):
            found = body
    return found


def _parse(code: str) -> list[str | Instruction]:
    lines: list[str | Instruction] = []
    for text in code.splitlines():
        label, instruction = LABEL.match(text), INSTRUCTION.match(text)
        if label:
            lines.append(label[1])
        elif instruction:
            lines.append(Instruction(instruction[2], instruction[3]))
    return lines


def _flops(opcode: str, num_warps: int) -> int | None:
    wide = HGMMA_SHAPE.match(opcode)
    if wide:
        m, n, k = map(int, wide.groups())
        return 2 * m * n * k * num_warps // 4
    shape = HMMA_SHAPES.get(opcode.split(".")[1]) if opcode.startswith("HMMA.") else None
    return 2 * shape[0] * shape[1] * shape[2] * num_warps if shape else None


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise EngineError(
            f"{path} is missing: triton's Linux wheel carries it, this triton {triton.__version__} does not"
        )
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout
