"""How large a piece of the attention one program takes. Chosen by hand and checked by the compile gates, not tuned at
run time: a tuner needs a GPU, and costs tens of microseconds a call.

    at most SHORT_QUERY new tokens    16 or 32 rows, 32 keys, splits of 256 keys     bound by reading K and V
    longer chunks                     128 rows, 64 keys, no splits                   bound by the tensor cores

The keys of a tile and of a split depend on the sequence and the model alone, never on which other sequences share the
batch, so that a sequence's result does not depend on them either.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from mini_engine.kernels.checks import KernelInputError

SHORT_QUERY = 8
SPLIT_SIZE = 256  # keys; the states of the splits then are 1.6 % of the traffic at a group of 4 in bf16
MIN_ROWS = 16  # the least that a tensor core multiplies


@dataclass(frozen=True)
class TileConfig:
    """block_m rows (query position, head of the group) by `tile` keys; split_size 0 leaves the keys in one piece.

    max_registers: a thread's; None leaves it to the compiler.
    """

    block_m: int
    tile: int
    split_size: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def num_splits(self, max_seq_len: int) -> int:
        return max(1, triton.cdiv(max_seq_len, self.split_size)) if self.split_size else 1

    def check(self, group: int, block_size: int) -> None:
        """Raises KernelInputError for what the kernel could not run, or would compute wrongly."""
        powers = all(triton.next_power_of_2(x) == x for x in (self.block_m, self.tile))
        if self.block_m < MIN_ROWS or self.tile < MIN_ROWS or not powers:
            raise KernelInputError(
                f"tiles of {self.block_m} rows by {self.tile} keys: both must be powers of two from {MIN_ROWS} up, "
                f"the least a tensor core multiplies"
            )
        if group > self.block_m:
            raise KernelInputError(f"{group} query heads per KV head do not fit a tile of {self.block_m} rows")
        if self.split_size % self.tile:
            raise KernelInputError(f"split_size {self.split_size} must be a multiple of the tile, {self.tile} keys")


def tile_config(max_query_len: int, group: int, head_dim: int, itemsize: int) -> TileConfig:
    """For sequences that are all short (at most SHORT_QUERY new tokens) or all longer. itemsize: bytes of K and V."""
    key_bytes = triton.next_power_of_2(head_dim) * itemsize
    if max_query_len <= SHORT_QUERY:
        rows = MIN_ROWS if max_query_len * group <= MIN_ROWS else 2 * MIN_ROWS
        tile = 32 if key_bytes <= 512 else 16
        # 128 registers let 4 blocks of 4 warps share an SM. Left alone, the compiler at times aims at 96, and spills.
        registers = 128 if key_bytes <= 256 else None
        return TileConfig(max(rows, triton.next_power_of_2(group)), tile, SPLIT_SIZE, 4, 3, registers)
    # Twice the bytes a key: half the rows and half the keys, so that sm_120's 99 KiB of shared memory hold the tile.
    rows, tile = (128, 64) if key_bytes <= 256 else (64, 32) if key_bytes <= 512 else (32, 16)
    # The third stage costs 512 bytes and lets the block-table load run ahead as well.
    return TileConfig(max(rows, triton.next_power_of_2(group)), tile, 0, num_warps=8, num_stages=3)
