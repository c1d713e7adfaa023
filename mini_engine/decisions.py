"""One line for each decision about a cached prefix: what was chosen, and the numbers it was chosen by."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Decision:
    """time_s: on the caller's clock. what: "admit", "evict" or "fetch". key: hash of the (first) block.

    num_bytes: of all blocks it is about. recompute_s: T_r. fetch_s: T_f, waiting for the link included. upkeep_s: T_m.
    probability: p_h; 1 where the prefix is wanted now. value_s: p_h · (T_r − T_f) − T_m. choice: what was done.
    reason: why, in a word or two; equal reasons are counted together.
    """

    time_s: float
    what: str
    key: int
    num_bytes: int
    recompute_s: float
    fetch_s: float
    upkeep_s: float
    probability: float
    value_s: float
    choice: str
    reason: str


def write_json_lines(decisions: Iterable[Decision], path: Path) -> None:
    """One JSON object a line, fields named as in `Decision`."""
    with path.open("w", encoding="utf-8") as file:
        for decision in decisions:
            file.write(json.dumps(asdict(decision)) + "\n")
