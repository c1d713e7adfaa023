"""A round's time as a line fitted to measurements: a fixed part, a part per new token, a part per causal pair.

Source: book 8.2.2. One price for every kind of round, prefill, decode and both together, so that schedules compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mini_engine.analysis.flops import causal_pairs
from mini_engine.analysis.graphs import padded_rows
from mini_engine.analysis.inputs import AnalysisError, not_negative, whole


@dataclass(frozen=True)
class Chunk:
    """What a request computes in a round: `new` tokens after `history` cached ones; a decode is `Chunk(1, context)`."""

    new: int
    history: int = 0

    def __post_init__(self) -> None:
        whole(1, new=self.new)
        whole(0, history=self.history)

    @property
    def pairs(self) -> int:
        return causal_pairs(self.new, self.history)


@dataclass(frozen=True)
class FittedStep:
    """Seconds of a round: base_s + per_token_s · new tokens + per_pair_s · causal pairs.

    shapes: row counts for which graphs were captured; a round pays for the rows of the graph it runs in.
    """

    base_s: float
    per_token_s: float
    per_pair_s: float
    shapes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        not_negative(base_s=self.base_s, per_token_s=self.per_token_s, per_pair_s=self.per_pair_s)

    def seconds(self, work: Iterable[Chunk]) -> float:
        """Time of one round over these chunks."""
        chunks = tuple(work)
        rows = padded_rows(sum(chunk.new for chunk in chunks), self.shapes)
        return self.base_s + self.per_token_s * rows + self.per_pair_s * sum(chunk.pairs for chunk in chunks)


# Fitted by the book to experiment 8-1 at batch 1 and 2K context only, without CUDA graphs: rounds of other sizes are
# extrapolated. The same model, card and eager mode gave 12.9 ms a decode in experiment 8-2 and 16.9 ms in 8-5 (this one
# is 26.26): the hosts differed and the cause is not established, so never mix times of different experiments.
BOOK_STEP = FittedStep(base_s=26.22e-3, per_token_s=30.4e-6, per_pair_s=3e-9)


def fit_step(rounds: Sequence[tuple[Iterable[Chunk], float]]) -> FittedStep:
    """Least-squares fit of a step to measured rounds: pairs of (chunks, seconds).

    Parts that come out negative are left out and the rest fitted again: time is not given back.
    Raises AnalysisError for rounds that cannot tell the three parts apart.
    """
    import numpy  # here, since nothing else of the arithmetic needs it and it takes longer to import than all of this

    chunks = [tuple(work) for work, _ in rounds]
    columns = numpy.array(
        [[1.0, sum(c.new for c in work), sum(c.pairs for c in work)] for work in chunks], dtype=float
    ).reshape(-1, 3)
    seconds = numpy.array([measured for _, measured in rounds], dtype=float)
    scale = columns.max(axis=0, initial=1.0)
    if numpy.linalg.matrix_rank(columns / scale) < 3:
        raise AnalysisError(
            f"{len(rounds)} measured rounds do not tell base, token and pair apart: measure decodes and prefills of at "
            f"least two lengths each"
        )
    kept, solution = [0, 1, 2], numpy.zeros(3)
    while kept:
        found = numpy.linalg.lstsq(columns[:, kept] / scale[kept], seconds, rcond=None)[0] / scale[kept]
        solution[:] = 0
        solution[kept] = found
        if (found >= 0).all():
            break
        kept = [part for part, value in zip(kept, found, strict=True) if value >= 0]
    base, per_token, per_pair = (float(part) for part in solution)
    return FittedStep(base, per_token, per_pair)
