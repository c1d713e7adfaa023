"""Compile gates: what the compiler made of every kernel, on two architectures, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from mini_engine.errors import ConfigError
from mini_engine.kernels import gates
from mini_engine.kernels.gpus import GPUS, gpu, static_bound

triton = pytest.importorskip("triton", reason="triton is for Linux only")
from mini_engine.kernels.cubin import Instruction, main_loop  # noqa: E402

Row = dict[str, Any]
ARCHES = ("sm_90", "sm_120")
ATTENTION = [f"{model} {kind}" for model in ("Qwen3-8B", "SmolLM2-135M") for kind in ("decode", "verify", "chunk")]
LATENT = ["DeepSeek-V2-Lite decode", "DeepSeek-V2-Lite verify", "DeepSeek-V2-Lite chunk"]
LATENT += ["DeepSeek-V3 decode", "DeepSeek-V3 chunk"]


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """Every kernel compiled once, in a process of its own."""
    return gates.report(ARCHES)


def attention(rows: list[Row], name: str, arch: str) -> Row:
    (row,) = [row for row in rows if row["shape"].startswith(name + ":") and row["arch"] == arch]
    return row


@pytest.mark.slow
def test_every_kernel_is_there(rows):
    kernels = {"paged_attention", "merge", "reshape_and_cache", "copy_blocks", "rms_norm", "rope", "swiglu"}
    found = {(row["kernel"], row["arch"], row["shape"].split()[0]) for row in rows}
    assert found == {
        *((k, arch, model) for k in kernels for arch in ARCHES for model in ("Qwen3-8B", "SmolLM2-135M")),
        *(("paged_mla", arch, name.split()[0]) for arch in ARCHES for name in LATENT),
    }


@pytest.mark.slow
def test_no_spills_and_shared_memory_fits(rows):
    assert [problem for row in rows for problem in gates.problems(row)] == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_multiplies_both_products_on_tensor_cores(name, arch, rows):
    """The multiply-adds of the main loop are exactly those of a tile: neither product is on the ordinary units."""
    row = attention(rows, name, arch)
    assert row["main_loop"] and row["mma_flop_ratio"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_multiplies_both_products_on_tensor_cores(name, arch, rows):
    """Scores 512 + 64 wide, results 512. With tiles of 16 keys, two tensor-core tiles, two of four warps repeat scores
    of the others."""
    row = attention(rows, name, arch)
    assert row["main_loop"]
    repeats = 1 if name == "DeepSeek-V2-Lite decode" else 2
    assert row["mma_flop_ratio"] == pytest.approx((repeats * 576 + 512) / (576 + 512))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    "name, block_m, tile", [(name, *((16, 32) if name == "DeepSeek-V2-Lite decode" else (32, 16))) for name in LATENT]
)
def test_a_tile_of_latents_arrives_while_another_is_multiplied(name, block_m, tile, arch, rows):
    """Shared memory has room for q and two tiles of latents: with fewer stages it would be one."""
    assert attention(rows, name, arch)["shared_bytes"] >= (block_m + 2 * tile) * 576 * 2


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ATTENTION + LATENT)
def test_attention_loads_ahead_in_wide_pieces(name, arch, rows):
    """Every load of the main loop is a copy in the background: K and V (or latents) 16 bytes a thread, the table 4."""
    row = attention(rows, name, arch)
    assert row["async_copies"] == sum(row["load_widths"].values())
    assert set(row["load_widths"]) == {"4", "16"} and row["load_widths"]["4"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, arch, mma, blocks",
    [
        ("Qwen3-8B decode", "sm_120", "HMMA", 4),
        ("Qwen3-8B verify", "sm_120", "HMMA", 3),  # 26 KiB of shared memory a block
        ("Qwen3-8B chunk", "sm_120", "HMMA", 1),  # sm_120 has no wgmma
        ("SmolLM2-135M decode", "sm_120", "HMMA", 4),
        ("SmolLM2-135M verify", "sm_120", "HMMA", 4),
        ("SmolLM2-135M chunk", "sm_120", "HMMA", 1),
        ("Qwen3-8B decode", "sm_90", "HMMA", 4),  # tiles of 16 rows: no wgmma, which takes 64
        ("Qwen3-8B verify", "sm_90", "HMMA", 4),
        ("Qwen3-8B chunk", "sm_90", "HGMMA", 1),
        ("SmolLM2-135M decode", "sm_90", "HMMA", 4),
        ("SmolLM2-135M verify", "sm_90", "HMMA", 4),
        ("SmolLM2-135M chunk", "sm_90", "HGMMA", 2),
        ("DeepSeek-V2-Lite decode", "sm_120", "HMMA", 1),  # 92 KiB of shared memory a block
        ("DeepSeek-V2-Lite verify", "sm_120", "HMMA", 1),  # 74
        ("DeepSeek-V2-Lite chunk", "sm_120", "HMMA", 1),
        ("DeepSeek-V3 decode", "sm_120", "HMMA", 1),
        ("DeepSeek-V3 chunk", "sm_120", "HMMA", 1),
        ("DeepSeek-V2-Lite decode", "sm_90", "HMMA", 2),
        ("DeepSeek-V2-Lite verify", "sm_90", "HMMA", 2),
        ("DeepSeek-V2-Lite chunk", "sm_90", "HMMA", 2),
        ("DeepSeek-V3 decode", "sm_90", "HMMA", 2),
        ("DeepSeek-V3 chunk", "sm_90", "HMMA", 2),
    ],
)
def test_tensor_core_instruction_and_occupancy_as_designed(name, arch, mma, blocks, rows):
    row = attention(rows, name, arch)
    assert {opcode.split(".")[0] for opcode in row["mma"]} == {mma}
    assert row["blocks_per_sm"] >= blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, shape, width",
    [
        ("copy_blocks", "16 blocks", 16),
        ("rms_norm", "64 tokens x 4096", 16),
        ("rms_norm", "64 tokens x 576", 16),
        ("rms_norm", "64 tokens x 32 heads", 8),  # 32 lanes cover a head of 256 bytes
        ("rope", "heads", 16),
        ("swiglu", "64 tokens", 16),
        ("reshape_and_cache", "Qwen3-8B", 8),
        ("reshape_and_cache", "SmolLM2", 4),
        ("merge", "Qwen3-8B", 16),
        ("merge", "SmolLM2", 8),
    ],
)
def test_small_kernels_load_in_wide_pieces(kernel, shape, width, rows):
    chosen = [row for row in rows if row["kernel"] == kernel and shape in row["shape"]]
    assert chosen and all(max(map(int, row["load_widths"])) >= width for row in chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ATTENTION if "chunk" not in name])
def test_attention_reads_k_and_v_once_per_kv_head(name, rows):
    assert attention(rows, name, "sm_120")["bytes_loaded_ratio"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ratio",
    [
        ("DeepSeek-V2-Lite decode", 1.0),
        ("DeepSeek-V3 decode", 4.0),  # 128 heads in tiles of 32
        ("DeepSeek-V2-Lite verify", 4 - 2 * (6 + 4 + 2) / 317),  # 8 queries, 2 a tile; the first tiles see less
    ],
)
def test_latents_are_read_once_a_tile_of_queries(name, ratio, rows):
    assert attention(rows, name, "sm_120")["bytes_loaded_ratio"] == pytest.approx(ratio)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, limit",
    [("Qwen3-8B decode", "memory"), ("Qwen3-8B chunk", "tensor"), ("DeepSeek-V2-Lite decode", "memory")],
)
def test_what_bounds_attention(name, limit, rows):
    """Decoding by reading K and V, a chunk by multiplying: issuing the instructions is not what takes the time."""
    row = attention(rows, name, "sm_120")
    assert row["static_bound_us"] == row[f"{limit}_bound_us"]


@pytest.mark.slow
def test_table_names_every_row(rows):
    text = gates.table(rows)
    assert len([line for line in text.splitlines() if "sm_" in line]) == len(rows)
    assert "lower bound" in text


BAD_TILES = """
import json
from dataclasses import replace
from mini_engine.kernels import specimens, gates
from mini_engine.kernels import {module} as module
specimen = next(s for s in specimens.specimens() if "{name}" in s.shape)
choose = module.{choice}
module.{choice} = lambda *shape: replace(choose(*shape), {changes})
print(json.dumps(gates._row(specimen, gates.gpu("sm_120"))))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("Qwen3-8B chunk", "num_warps=4", "spills"),
        ("Qwen3-8B chunk", "block_m=32, tile=256", "shared memory"),
        ("DeepSeek-V3 decode", "tile=32, num_stages=3", "spills"),
        ("DeepSeek-V2-Lite decode", "tile=64", "shared memory"),
    ],
)
def test_bad_tiles_are_caught(name, changes, says):
    """The gate is seen to close: too few warps for the accumulators, too large a tile for the SM."""
    module, choice = ("paged_mla", "mla_tile_config") if "DeepSeek" in name else ("paged_attention", "tile_config")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = BAD_TILES.format(name=name, module=module, choice=choice, changes=changes)
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert says in " ".join(gates.problems(json.loads(result.stdout)))


@pytest.mark.parametrize(
    "arch, registers, shared, warps, blocks",
    [  # by hand from the limits of the programming guide
        ("sm_80", 32, 0, 8, 8),  # 64 warps
        ("sm_80", 255, 0, 8, 1),  # 65536 // (256 * 32 * 8)
        ("sm_90", 128, 0, 4, 4),  # 65536 // (128 * 32 * 4)
        ("sm_90", 96, 0, 4, 5),
        ("sm_90", 97, 0, 4, 4),  # 97 registers a thread are handed out as 104
        ("sm_90", 16, 0, 1, 32),  # blocks
        ("sm_120", 16, 0, 1, 24),
        ("sm_120", 32, 0, 8, 6),  # 48 warps
        ("sm_120", 32, 33 * 1024, 4, 3 - 1),  # 34 KiB with the driver's own; 3 * 34 > 100
        ("sm_120", 32, 99 * 1024, 4, 1),
        ("sm_100", 32, 227 * 1024, 4, 1),
    ],
)
def test_blocks_per_sm(arch, registers, shared, warps, blocks):
    assert gpu(arch).blocks_per_sm(registers, shared, warps) == blocks


def test_unknown_architecture_is_refused():
    with pytest.raises(ConfigError, match="sm_70.*sm_80, sm_90, sm_100, sm_120"):
        gpu("sm_70")


def test_static_bound_is_the_slowest_of_three():
    card = GPUS["sm_120"]
    bound = static_bound(card, num_bytes=1.792e12, flops=2 * 503.8e12, warp_instructions=4 * 188 * 2.617e9 * 3)
    assert (bound.memory, bound.tensor, bound.issue) == pytest.approx((1, 2, 3))
    assert bound.seconds == bound.issue


def test_main_loop_is_the_innermost_with_tensor_cores():
    def code(*items: str) -> list[str | Instruction]:
        return [item if item.startswith(".L") else Instruction(*item.split(" ", 1)) for item in items]

    lines = code(
        ".L_x_0", "LDG.E R0", "BRA `(.L_x_0)",  # a search: no tensor cores
        ".L_x_1", "MOV R1", ".L_x_2", "HMMA.16816.F32.BF16 R2", "BRA `(.L_x_3)", "LDGSTS.E.128 R3", ".L_x_3",
        "BRA `(.L_x_2)", "HMMA.16816.F32.BF16 R4", "BRA `(.L_x_1)",
    )  # fmt: skip
    loop = main_loop(lines)
    assert loop is not None
    assert [item.opcode for item in loop] == ["HMMA.16816.F32.BF16", "BRA", "LDGSTS.E.128", "BRA"]
    assert main_loop(lines[:3]) is None


@pytest.mark.parametrize(
    "opcode, width",
    [("LDG.E.128", 16), ("LDG.E.64.CONSTANT", 8), ("LDG.E", 4), ("LDG.E.U16", 2), ("LDGSTS.E.BYPASS.128", 16),
     ("LDS.128", None), ("STG.E.128", None)],
)  # fmt: skip
def test_load_widths(opcode, width):
    assert Instruction(opcode, "").load_width == width
