"""The memory ledger of an instance: M_w + M_KV + M_a + M_u <= C on every card of it (book 8.1.2)."""

from __future__ import annotations

from dataclasses import dataclass

from mini_engine.analysis.inputs import AnalysisError, whole

# In the order in which they are taken: weights before any request, fixed buffers at start-up, KV as requests come.
TERMS = ("weights", "buffers", "activations", "kv")


@dataclass(frozen=True)
class Ledger:
    """What one card holds, in bytes.

    weights: M_w, resident weights. kv: M_KV, physical blocks, a shared one counted once. activations: M_a, activations
    and shared workspace. buffers: M_u, other lasting buffers, those of CUDA graphs among them.
    capacity: C, what the instance may use of the card; of a whole card, what its driver reports.

    The book's example sets 12 GiB aside "for KV and auxiliary buffers" and then fills all of it with KV (37, 10 and 35
    requests): its buffers are in the 4.7 GiB that remain of 32.
    """

    capacity: int
    weights: int = 0
    kv: int = 0
    activations: int = 0
    buffers: int = 0

    def __post_init__(self) -> None:
        whole(
            0,
            capacity=self.capacity,
            weights=self.weights,
            kv=self.kv,
            activations=self.activations,
            buffers=self.buffers,
        )

    @property
    def used(self) -> int:
        return self.weights + self.kv + self.activations + self.buffers

    @property
    def free(self) -> int:
        """Bytes left; negative by what is missing."""
        return self.capacity - self.used

    @property
    def fits(self) -> bool:
        return self.free >= 0

    @property
    def broken_by(self) -> str | None:
        """The term that no longer fits, filling in the order of TERMS; None if all do."""
        total = 0
        for term in TERMS:
            total += getattr(self, term)
            if total > self.capacity:
                return term
        return None


@dataclass(frozen=True)
class Instance:
    """One model on one or several cards. Memory free on one card is of no use to another one."""

    cards: tuple[Ledger, ...]

    def __post_init__(self) -> None:
        if not self.cards:
            raise AnalysisError("an instance needs at least one card")

    @property
    def fits(self) -> bool:
        """Whether every card holds what it has to, which is more than the sums fitting."""
        return all(card.fits for card in self.cards)

    @property
    def tightest(self) -> int:
        """Index of the card with the least free memory: the one that limits the instance."""
        return min(range(len(self.cards)), key=lambda index: self.cards[index].free)

    @property
    def free(self) -> int:
        """Bytes by which *every* card could still grow: those of the tightest one."""
        return self.cards[self.tightest].free
