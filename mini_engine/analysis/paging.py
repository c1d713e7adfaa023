"""Blocks against one stretch of memory for each sequence: slots allocated, used and shared (book 8.3.1 and 8.3.2).

A slot holds one token's K and V in all layers. Bytes and whole requests: `capacity.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mini_engine.analysis.capacity import blocks_needed, shared_blocks, tokens_computed
from mini_engine.analysis.inputs import AnalysisError, whole


def reserved_slots(lengths: Sequence[int], maximum: int) -> int:
    """Slots set aside when every sequence gets the longest it may become, in one stretch (book 8.3.1).

    Raises AnalysisError for a sequence that is longer already.
    """
    whole(0, maximum=maximum)
    for length in lengths:
        whole(0, length=length)
        if length > maximum:
            raise AnalysisError(f"a sequence of {length} tokens does not fit the {maximum} slots reserved for it")
    return len(lengths) * maximum


def table_entries(lengths: Iterable[int], block_size: int) -> int:
    """Entries of all block tables together, ⌈L/p⌉ for each sequence."""
    return sum(blocks_needed(length, block_size) for length in lengths)


def paged_slots(lengths: Iterable[int], block_size: int) -> int:
    """Slots allocated in blocks that nobody shares."""
    return block_size * table_entries(lengths, block_size)


def tail_waste(length: int, block_size: int) -> int:
    """Empty slots of a sequence's last block, p⌈L/p⌉ − L: at most p − 1 (book 8.3.1)."""
    return block_size * blocks_needed(length, block_size) - length


def unused_slots(lengths: Iterable[int], block_size: int) -> int:
    """Empty slots of all last blocks together."""
    return sum(tail_waste(length, block_size) for length in lengths)


def shared_slots(lengths: Sequence[int], block_size: int, sharers: int, prefix: int) -> int:
    """Slots allocated when the first `sharers` sequences begin with the same `prefix` tokens (book 8.3.1).

    Only full blocks are shared: each saves its slots once for every sharer but one. A look at what is stored; at a
    running request's prompt, whose last token is always computed anew, look with `capacity.shared_blocks`.
    Raises AnalysisError where a sharer is shorter than the prefix.
    """
    whole(0, sharers=sharers, prefix=prefix)
    if sharers > len(lengths) or any(length < prefix for length in lengths[:sharers]):
        raise AnalysisError(
            f"{sharers} sequences cannot share {prefix} tokens: the lengths are {', '.join(map(str, lengths))}"
        )
    saved = max(0, sharers - 1) * (prefix // block_size)
    return paged_slots(lengths, block_size) - block_size * saved


def slot_of(position: int, block_table: Sequence[int], block_size: int) -> int:
    """Where the K and V of a token lie: physical block, then the place in it (figure 8-10 of the book).

    position: of the token in its sequence, from 0. Raises AnalysisError for one the table has no block for.
    """
    whole(0, position=position)
    whole(1, block_size=block_size)
    logical, offset = divmod(position, block_size)
    if logical >= len(block_table):
        raise AnalysisError(
            f"position {position} is in logical block {logical}, of which the table has {len(block_table)}"
        )
    return block_table[logical] * block_size + offset


@dataclass(frozen=True)
class Branches:
    """`count` sequences with `shared` blocks in common and `own` blocks each (book 8.3.2)."""

    count: int
    shared: int
    own: int

    def __post_init__(self) -> None:
        whole(1, count=self.count)
        whole(0, shared=self.shared, own=self.own)

    @property
    def references(self) -> int:
        """Entries of all block tables: the blocks that separate storage would take."""
        return self.count * (self.shared + self.own)

    @property
    def physical(self) -> int:
        """Blocks that exist."""
        return self.shared + self.tails if self.references else 0

    @property
    def tails(self) -> int:
        """Blocks that grow with the number of branches."""
        return self.count * self.own

    @property
    def saved(self) -> float:
        """Share of the separately stored blocks that sharing saves."""
        return 1 - self.physical / self.references if self.references else 0.0


def prefix_branches(count: int, prompt: int, output: int, block_size: int = 16) -> Branches:
    """Requests with one and the same prompt that find it in the prefix cache, at the end of generation.

    The block of the prompt's last token is each one's own: the token is computed to draw the first output.
    """
    shared = shared_blocks(prompt, prompt, block_size)
    return Branches(count, shared, blocks_needed(tokens_computed(prompt, output), block_size) - shared)


def forked_branches(count: int, prompt: int, output: int, block_size: int = 16) -> Branches:
    """One request that branches after its prefill, at the end of generation: all full blocks of the prompt are shared.

    A started last block is copied by each branch that writes into it while others still refer to it.
    """
    shared = prompt // block_size if output > 1 else blocks_needed(prompt, block_size)
    return Branches(count, shared, blocks_needed(tokens_computed(prompt, output), block_size) - shared)


def saved_by_a_longer_prefix(requests: int, blocks: int = 1) -> int:
    """Blocks fewer when that many full blocks of each request become part of the common prefix: (b − 1) each.

    From s + b·o blocks to (s + 1) + b·(o − 1), at the same length (exercise 8-3).
    """
    whole(1, requests=requests)
    whole(0, blocks=blocks)
    return (requests - 1) * blocks
