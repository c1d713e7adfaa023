"""`mini-engine kernels`: compile every kernel for four GPU architectures, without a GPU, and say what came out.

    report(["sm_120"])  ->  one row a kernel, shape and architecture:
        registers, spill_bytes          a thread
        shared_bytes, blocks_per_sm     a block; how many fit one SM by registers, shared memory and warps
        load_widths, async_copies, mma  of the main loop, or of the whole kernel where there is none
        mma_flop_ratio                  tensor-core work in the main loop / that of both products of a tile; 1 is right,
                                        more where warps that find no keys of their own repeat those of others
        least_bytes, *_bound_us         the least traffic; the time at full bandwidth, tensor-core rate, issue rate
        static_bound_us                 the largest of the three: a LOWER bound on the time, not a forecast
        bytes_loaded_ratio              what decode and verification load of K and V / K and V once per KV head (latents
                                        once for all heads): counted load by load in the interpreter, at short
                                        contexts; None for all others

Compiling happens in a process of its own: Triton's interpreter, which the tests use, cannot share one with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from mini_engine.errors import EngineError
from mini_engine.kernels.gpus import GPU, GPUS, gpu, static_bound

Row = dict[str, Any]
COLUMNS = {
    "kernel": "kernel",
    "shape": "shape",
    "arch": "arch",
    "registers": "regs",
    "spill_bytes": "spill B",
    "shared_bytes": "shared B",
    "blocks_per_sm": "blocks/SM",
    "load_widths": "loads, B x n",
    "async_copies": "async",
    "mma": "tensor cores",
    "bytes_loaded_ratio": "KV loads / least",
    "memory_bound_us": "bytes us",
    "static_bound_us": "bound us",
}
COUNTED = ("paged_attention", "paged_mla")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mini-engine kernels`."""
    parser.add_argument(
        "--arch", action="append", choices=list(GPUS), help="one architecture (may be repeated); all four"
    )
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if a kernel spills registers or does not fit."""
    rows = report(args.arch or list(GPUS))
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    return int(any(problems(row) for row in rows))


def report(arches: Seq[str]) -> list[Row]:
    """A row a kernel, shape and architecture. Raises ConfigError, or EngineError where triton cannot compile."""
    names = [gpu(arch).arch for arch in arches]
    rows = _in_process("mini_engine.kernels.gates", names, interpret=False)
    counted = {item["shape"]: item for item in _in_process("mini_engine.kernels.traffic", [], interpret=True)}
    for row in rows:
        traffic = counted.get(row["shape"].split(":")[0]) if row["kernel"] in COUNTED else None
        row["bytes_loaded_ratio"] = traffic and traffic["loaded"] / traffic["least"]
    return rows


def problems(row: Row) -> list[str]:
    """What must not be, on any architecture."""
    found = []
    if row["spill_bytes"] or row["spill_instructions"]:
        found.append(f"{row['kernel']} on {row['arch']} spills {row['spill_bytes']} bytes of registers a thread")
    if row["shared_bytes"] > gpu(row["arch"]).shared_per_block:
        found.append(f"{row['kernel']} on {row['arch']} needs {row['shared_bytes']} bytes of shared memory a block")
    return found


def table(rows: list[Row]) -> str:
    """For people."""
    lines = [list(COLUMNS.values())] + [[_cell(row[name]) for name in COLUMNS] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    note = "bound us: the largest of bytes, tensor cores and instructions to issue; a lower bound, not a forecast"
    return "\n".join([*text, "", note, *(problem for row in rows for problem in problems(row))])


def measure(arches: Seq[str]) -> list[Row]:
    """Compile in this process. Raises EngineError where Triton's interpreter is on."""
    from mini_engine.kernels.specimens import specimens

    return [_row(specimen, gpu(arch)) for specimen in specimens() for arch in arches]


def _row(specimen: Any, card: GPU) -> Row:
    from mini_engine.kernels.aot import compile_launch, record
    from mini_engine.kernels.cubin import read_cubin
    from mini_engine.kernels.merge import merge_kernel

    # Attention over several splits launches the merge as well; it is a specimen of its own.
    launches = record(specimen.call, specimen.kernel, merge_kernel)
    launch = next(item for item in launches if item.kernel is specimen.kernel)
    cubin = read_cubin(compile_launch(launch, card.capability))
    loops = specimen.loops if cubin.has_main_loop else launch.programs
    bound = static_bound(card, specimen.least_bytes, specimen.flops, len(cubin.main) * loops * cubin.num_warps)
    flops = cubin.mma_flops
    return {
        "kernel": launch.kernel.__name__.removesuffix("_kernel"),
        "shape": specimen.shape,
        "arch": card.arch,
        "card": card.card,
        "grid": launch.grid,
        "num_warps": cubin.num_warps,
        "registers": cubin.registers,
        "spill_bytes": cubin.spill_bytes,
        "spill_instructions": cubin.spill_instructions,
        "shared_bytes": cubin.shared_bytes,
        "blocks_per_sm": card.blocks_per_sm(cubin.registers, cubin.shared_bytes, cubin.num_warps),
        "main_loop": cubin.has_main_loop,
        "main_instructions": len(cubin.main),
        "load_widths": cubin.load_widths,
        "async_copies": cubin.async_copies,
        "mma": cubin.mma,
        "mma_flop_ratio": flops * specimen.loops / specimen.flops if flops and specimen.flops else None,
        "least_bytes": specimen.least_bytes,
        "bytes_loaded_ratio": None,
        "memory_bound_us": bound.memory * 1e6,
        "tensor_bound_us": bound.tensor * 1e6,
        "issue_bound_us": bound.issue * 1e6,
        "static_bound_us": bound.seconds * 1e6,
    }


def _in_process(module: str, arguments: Seq[str], interpret: bool) -> list[Row]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    package = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EngineError(f"{module} failed in its own process: {reason}")
    return json.loads(result.stdout)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} x {count}" for name, count in value.items()) or "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1:])))
