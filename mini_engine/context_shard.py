"""Decode context parallelism: which rank holds which token of a sequence, and where. Arithmetic only.

Tokens are dealt out like cards, `interleave` at a time, so that every rank's part grows evenly:

    N = 2 ranks, I = 1, blocks of B = 4          position   0 1 2 3 4 5 6 7 | 8 9 ...
    owner = (position // I) % N                  owner      0 1 0 1 0 1 0 1 | 0 1
    virtual block = B * N = 8 positions          slot       0 0 1 1 2 2 3 3 | 4 4     (block table 0, 1, ...)

All ranks use the same block table: block i of a sequence is its virtual block i, of which each rank holds its own B
tokens. So a pool of as many blocks holds N times the tokens, and prefixes match by virtual blocks. The k-th token of a
rank's own lies at block_table[k // B] * B + k % B: to attention a shard is a paged sequence of `local_length` tokens.

The picture of contiguous runs (rank 0 holds 0-50K, rank 1 50-100K, ...) is a simplification: with runs, a request that
has come to 60K tokens would read 50K on one rank, 10K on the next and nothing on the others.

Source: vLLM's `get_dcp_local_seq_lens` and `cp_kv_cache_interleave_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mini_engine.errors import ConfigError

if TYPE_CHECKING:  # configs are checked with this module, and the arithmetic does not pay for numpy
    import numpy as np

NO_SLOT = -1


@dataclass(frozen=True)
class ContextShard:
    """One rank's part of every sequence. A shard of size 1 is the identity: it owns all tokens, where they always lie.

    rank, size: place in the context-parallel group. interleave: consecutive tokens that go to one rank.
    Raises ConfigError for a rank outside the group and for sizes below 1.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.interleave < 1:
            raise ConfigError(
                f"a context shard needs at least 1 rank and 1 token in a run, got {self.size} and {self.interleave}"
            )
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} is not in a group of {self.size}: ranks are 0 to {self.size - 1}")

    def owner(self, position: int) -> int:
        """The rank that holds the token at `position`."""
        return position // self.interleave % self.size

    def owns(self, position: int) -> bool:
        return self.owner(position) == self.rank

    def local_length(self, length: int) -> int:
        """How many of the first `length` tokens lie here; 0 where the sequence is too short to reach this rank."""
        rounds, rest = divmod(length, self.size * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def local_position(self, position: int) -> int:
        """How many tokens before `position` lie here: for a token of this rank, its place among the rank's own."""
        return self.local_length(position)

    def global_position(self, local_position: int) -> int:
        """Where in the sequence the k-th token of this rank stands."""
        run, offset = divmod(local_position, self.interleave)
        return (run * self.size + self.rank) * self.interleave + offset

    def virtual_block_size(self, block_size: int) -> int:
        """Tokens of a sequence that one block id stands for, on all ranks together.

        Raises ConfigError where a run of `interleave` tokens would be cut by the end of a block.
        """
        self.check_block_size(block_size)
        return block_size * self.size

    def check_block_size(self, block_size: int) -> None:
        """Raise ConfigError unless blocks hold whole runs of `interleave` tokens."""
        if block_size < 1 or block_size % self.interleave:
            raise ConfigError(
                f"cp_kv_cache_interleave_size {self.interleave} must divide block_size {block_size}, so that a block "
                f"holds whole runs; use one of {', '.join(map(str, _divisors(max(block_size, 1))))}"
            )

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Blocks of a sequence of `num_tokens` tokens, the same on every rank."""
        return -(-num_tokens // self.virtual_block_size(block_size))

    def slot_mapping(self, positions: np.ndarray, block_table: np.ndarray, block_size: int) -> np.ndarray:
        """Slot of every token in this rank's pool, -1 (write nothing) for tokens of other ranks. int64, like positions.

        positions: [T], places in their sequences. block_table: [W] of one sequence, or [T, W] with a row a token.
        """
        import numpy as np

        virtual = self.virtual_block_size(block_size)
        block, offset = positions // virtual, positions % virtual
        table = np.asarray(block_table)
        ids = (table[block] if table.ndim == 1 else table[np.arange(len(positions)), block]).astype(np.int64)
        return self.local_slots(ids * virtual + offset, block_size)

    def local_slots(self, slots: np.ndarray, block_size: int) -> np.ndarray:
        """The same from slots in a pool of virtual blocks, as the scheduler counts them: id * B * N + offset."""
        import numpy as np

        ids, offset = np.divmod(slots, self.virtual_block_size(block_size))
        run, within = np.divmod(offset, self.interleave)
        local = ids * block_size + run // self.size * self.interleave + within
        return np.where(run % self.size == self.rank, local, NO_SLOT)


def check_context_parallel_size(tensor_parallel_size: int, size: int, num_heads: int, num_kv_heads: int) -> None:
    """Raise ConfigError, with the rule and what would work, unless `size` context shards fit the tensor-parallel group.

    num_kv_heads: 1 for multi-head latent attention, whose latent serves all query heads.
    A context group is a run of `size` neighbouring ranks, and what it cuts is the copies of one KV head: the ranks must
    all hold the same one. Ranks 2 and 3 of 12 query heads, 2 KV heads, tp 6 and dcp 2 do not (3 ranks hold each KV
    head), yet vLLM 0.33 takes it, since its check is size <= tp // KV heads.
    """
    tp = tensor_parallel_size
    problem = _problem(tp, size, num_heads, num_kv_heads)
    if problem is None:
        return
    here = allowed_context_parallel_sizes(tp, num_heads, num_kv_heads)
    if len(here) > 1:
        works = f"at tensor_parallel_size {tp}: {', '.join(map(str, here))}"
    else:
        tps = [t for t in _divisors(max(num_heads, 1)) if _problem(t, size, num_heads, num_kv_heads) is None]
        works = f"tensor_parallel_size {', '.join(map(str, tps))}" if tps else "size 1 at any number of ranks"
    raise ConfigError(f"decode_context_parallel_size {size}: {problem}. What works: {works}")


def allowed_context_parallel_sizes(tensor_parallel_size: int, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """All context parallel sizes that the tensor parallel size allows, ascending; () where that itself cannot be."""
    sizes = range(1, max(tensor_parallel_size, 0) + 1)
    return tuple(n for n in sizes if _problem(tensor_parallel_size, n, num_heads, num_kv_heads) is None)


def _problem(tp: int, size: int, heads: int, kv_heads: int) -> str | None:
    """The first rule that is broken, with its numbers; None where none is."""
    if min(tp, size, heads, kv_heads) < 1:
        return f"all sizes must be at least 1, got tp {tp}, dcp {size}, {heads} query and {kv_heads} KV heads"
    if heads % tp:
        return f"tensor_parallel_size {tp} must divide the {heads} query heads"
    if size == 1:
        return None
    if tp % size:
        return f"it must divide tensor_parallel_size {tp}"
    if tp % kv_heads:
        return (
            f"tensor_parallel_size {tp} must be a multiple of the {kv_heads} KV heads, so that each has as many copies"
        )
    copies = tp // kv_heads
    if copies == 1:
        return f"at tensor_parallel_size {tp} the {kv_heads} KV heads have no copies to replace by shards"
    if copies % size:
        return (
            f"it must divide the {copies} copies of each KV head ({tp} ranks / {kv_heads} KV heads), or a context "
            f"group would mix KV heads"
        )
    return None


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
