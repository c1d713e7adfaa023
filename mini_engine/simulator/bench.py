"""What the simulation itself costs, early and late: a round must not slow down as requests come and go."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mini_engine.simulator.loop import Simulator
from mini_engine.simulator.report import format_table


class Part(NamedTuple):
    """A stretch of rounds. step_us: wall time of a round; sequence_us: of a round, for each running sequence."""

    first_round: int
    num_rounds: int
    num_finished: int
    mean_running: float
    mean_waiting: float
    step_us: float
    sequence_us: float


def step_costs(simulator: Simulator, parts: int = 10, clock: Callable[[], float] = time.perf_counter) -> list[Part]:
    """Run the simulator to its end, timing every round, and average over `parts` stretches of equally many rounds.

    num_finished: requests that had finished when the stretch began: what the cost must not depend on.
    """
    times = [clock()]
    while simulator.has_unfinished():
        simulator.step()
        times.append(clock())
    seconds = np.diff(times)
    rounds = simulator.timeline.rounds
    ends = np.sort([r.metrics.finished for r in simulator.timeline.requests if r.metrics.finished is not None])
    result = []
    for indices in np.array_split(np.arange(len(rounds)), min(parts, len(rounds)) or 1):
        if not len(indices):
            continue
        running = np.array([rounds[i].num_running for i in indices])
        spent = seconds[indices]
        result.append(
            Part(
                first_round=int(indices[0]),
                num_rounds=len(indices),
                num_finished=int(np.searchsorted(ends, rounds[indices[0]].start, side="right")),
                mean_running=float(running.mean()),
                mean_waiting=float(np.mean([rounds[i].num_waiting for i in indices])),
                step_us=float(spent.mean() * 1e6),
                sequence_us=float(spent.sum() / max(running.sum(), 1) * 1e6),
            )
        )
    return result


def cost_table(parts: list[Part]) -> str:
    """The stretches as a table."""
    rows = [
        [
            f"{part.first_round:,}",
            f"{part.num_rounds:,}",
            f"{part.num_finished:,}",
            f"{part.mean_running:.1f}",
            f"{part.mean_waiting:.1f}",
            f"{part.step_us:.1f}",
            f"{part.sequence_us:.2f}",
        ]
        for part in parts
    ]
    return format_table(["from round", "rounds", "finished", "running", "waiting", "µs/round", "µs/sequence"], rows)
