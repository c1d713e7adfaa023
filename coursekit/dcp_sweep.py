"""The runs that chapter 10 draws: an agent trace at fixed concurrency, TP against TP + DCP, kept as small data.

    python -m coursekit.dcp_sweep            # minutes; writes labs/records/dcp_sweep.json

Everything is seeded and runs on the simulator's virtual clock, so the file is the same on every machine, as long as the
simulator is. What is kept: the rows beside the post's, throughput under three readings, five length bands.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from inspect import signature
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mini_engine.analysis.dcp_layouts import Fabric
from mini_engine.simulator.dcp_cost import Cluster
from mini_engine.simulator.dcp_post import Pair, Row, compare, published_table
from mini_engine.simulator.dcp_serving import Load, replay
from mini_engine.simulator.dcp_trace import BLOCK_SIZE, SHORTEST, agent_trace

RECORD = Path(__file__).parents[1] / "labs" / "records" / "dcp_sweep.json"
NUM_REQUESTS = 3000
READINGS = ("output", "new", "all")


def assumptions(cluster: Cluster) -> dict[str, str]:
    """Every field of the cost model and its value, in words."""
    return {field.name: _said(getattr(cluster, field.name)) for field in fields(cluster) if field.name != "dcp"}


def trace_constants(num_requests: int) -> dict[str, int | float]:
    """What the trace is made with: the defaults of `agent_trace`, whose docstring says what is stated and what ours."""
    given = {name: value.default for name, value in signature(agent_trace).parameters.items()}
    return given | {"num_requests": num_requests, "shortest_prompt": SHORTEST, "block_size": BLOCK_SIZE}


def run(num_requests: int, concurrencies: Iterable[int]) -> dict[str, Any]:
    """Both sweeps over the same trace, as plain data. Raises RequestError for a trace too short for the concurrency."""
    trace, levels = agent_trace(num_requests), list(concurrencies)
    progress = tqdm(total=2 * len(levels), unit="run")
    sweeps: dict[int, list[Load]] = {}
    for size in (1, 8):
        sweeps[size] = []
        for level in levels:
            sweeps[size].append(replay(trace, Cluster(dcp=size), level))
            progress.update()
    progress.close()
    return {
        "made_by": "python -m coursekit.dcp_sweep",
        "assumptions": assumptions(Cluster()),
        "trace": trace_constants(num_requests),
        "rows": [asdict(row) for row in compare(sweeps[1], sweeps[8])],
        "runs": {f"dcp {size}": [_summary(load) for load in loads] for size, loads in sweeps.items()},
    }


def read(path: Path = RECORD) -> tuple[list[Row], dict[str, Any]]:
    """The rows beside the post's table, and all that was stored."""
    stored = json.loads(path.read_text())
    return [_row(row) for row in stored["rows"]], stored


def _row(values: dict[str, Any]) -> Row:
    typed: dict[str, Any] = {k: Pair(**v) if isinstance(v, dict) else v for k, v in values.items()}
    return Row(**typed)


def _summary(load: Load) -> dict[str, Any]:
    return {
        "concurrency": load.concurrency,
        "running": round(load.running, 1),
        "kv_share": round(load.kv_share, 4),
        "kv_peak": round(load.kv_peak, 4),
        "hit_share": round(load.hit_share, 4),
        "tokens_per_s_per_user": round(load.tokens_per_s_per_user, 2),
        "tokens_per_s_per_gpu": {name: round(load.tokens_per_s_per_gpu(name), 1) for name in READINGS},
        "bins": [None if band is None else round(band.tokens_per_s_per_user, 2) for band in load.bins()],
    }


def _said(value: object) -> str:
    if isinstance(value, Fabric):
        return f"{value.name}, {value.hop_s * 1e6:.1f} µs a hop"
    return str(getattr(value, "name", value))


def main() -> None:
    parser = argparse.ArgumentParser("coursekit.dcp_sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="lines of the trace (%(default)s)")
    parser.add_argument("--out", type=Path, default=RECORD, help="file to write")
    options = parser.parse_args()
    stored = run(options.requests, published_table()["concurrency"])
    options.out.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
