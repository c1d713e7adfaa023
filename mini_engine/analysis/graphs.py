"""Padding to captured graph shapes: a round runs in the smallest graph that holds its rows (book 8.2.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mini_engine.analysis.inputs import not_negative, positive, whole


def padded_rows(rows: int, shapes: Iterable[int] = ()) -> int:
    """Rows that are really computed. Above the largest shape (or with none) a round runs eagerly, unpadded."""
    whole(0, rows=rows)
    sizes = tuple(shapes)
    for size in sizes:
        whole(1, shape=size)
    return min((size for size in sizes if size >= rows), default=rows) if rows else 0


def padding(rows: int, shapes: Iterable[int] = ()) -> int:
    """Rows computed for nothing."""
    return padded_rows(rows, shapes) - rows


def staircase(max_rows: int, shapes: Sequence[int]) -> list[tuple[int, int]]:
    """(rows, rows computed) for 1 … max_rows: flat within a shape, a step after each."""
    whole(1, max_rows=max_rows)
    return [(rows, padded_rows(rows, shapes)) for rows in range(1, max_rows + 1)]


def capture_break_even(capture_s: float, rows_saved: int, row_s: float) -> int | None:
    """Rounds after which capturing one more graph has paid for itself; None if it saves nothing.

    rows_saved: padding avoided each time it is used. row_s: seconds of one row. The graph's buffers stay in memory as
    long as the engine runs (M_u of book 8.1.2): put them in the `Ledger` as well.
    """
    positive(capture_s=capture_s)
    whole(0, rows_saved=rows_saved)
    not_negative(row_s=row_s)
    saved = rows_saved * row_s
    return math.ceil(capture_s / saved) if saved > 0 else None
