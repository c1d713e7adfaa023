"""Our figures beside those a source prints, as text: what the reader compares, and what a notebook test compares."""

from __future__ import annotations

from collections.abc import Iterable


def beside(rows: Iterable[tuple[str, str, str]], headers: tuple[str, str, str] = ("", "computed", "book")) -> str:
    """A table of (what, ours, theirs), already formatted with their units; the figures are aligned on the right."""
    table = [headers, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    return "\n".join(
        f"{what:<{widths[0]}}  {ours:>{widths[1]}}  {theirs:>{widths[2]}}".rstrip() for what, ours, theirs in table
    )
