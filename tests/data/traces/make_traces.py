"""Make the small traces beside this file: same formats as the public ones, invented content.

    python tests/data/traces/make_traces.py          writes chat.jsonl, session_a.json, session_b.json

Seeded, and drawn with `Random.random()` alone, whose sequence Python promises never to change.
"""

from __future__ import annotations

import json
import math
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).resolve().parent
CHAT_BLOCK, AGENT_BLOCK = 512, 64


def between(random: Random, low: int, high: int) -> int:
    return low + int(random.random() * (high - low + 1))


def chat_trace(num_users: int = 12, seed: int = 1) -> list[dict[str, Any]]:
    """Users who talk in turns, all behind one system prompt of two blocks. A block that was partly filled gets a new
    id once it holds more: it is other content then."""
    random, fresh = Random(seed), count()
    system = [next(fresh), next(fresh)]
    rows = []
    for _ in range(num_users):
        time, length, ids = between(random, 0, 20_000), len(system) * CHAT_BLOCK, list(system)
        for _ in range(between(random, 1, 5)):
            length += between(random, 30, 3_000)
            ids += [next(fresh) for _ in range(math.ceil(length / CHAT_BLOCK) - len(ids))]
            output = between(random, 1, 120)
            rows.append({"timestamp": time, "input_length": length, "output_length": output, "hash_ids": list(ids)})
            ids = ids[: length // CHAT_BLOCK]
            length += output
            time += between(random, 4_000, 30_000)
    return sorted(rows, key=lambda row: row["timestamp"])


class Conversation:
    """An agent's context: it grows, and only its full blocks have ids."""

    def __init__(self, random: Random, fresh: count[int], length: int):
        self.random, self.fresh, self.length, self.time = random, fresh, length, 0.0
        self.ids: list[int] = []

    def rewrite(self, kept_blocks: int, length: int) -> None:
        """Keep the first blocks and replace what follows: a summary instead of the history."""
        self.ids, self.length = self.ids[:kept_blocks], length

    def request(self, kind: str) -> dict[str, Any]:
        self.ids += [next(self.fresh) for _ in range(self.length // AGENT_BLOCK - len(self.ids))]
        output = between(self.random, 20, 200)
        row = {"t": round(self.time, 1), "type": kind, "in": self.length, "out": output, "hash_ids": list(self.ids)}
        self.time += between(self.random, 20, 150) / 10
        self.length += output + between(self.random, 10, 900)
        return row


def agent_session(name: str, seed: int, with_subagent: bool) -> dict[str, Any]:
    random = Random(seed)
    fresh = count(1)  # every session counts from 1: equal ids of two sessions mean nothing
    main = Conversation(random, fresh, between(random, 1_500, 2_500))
    requests = [main.request("s" if i % 2 else "n") for i in range(6)]
    if with_subagent:
        helper = Conversation(random, count(1), 900)
        requests.append(
            {
                "t": round(main.time, 1),
                "type": "subagent",
                "agent_id": "agent_001",
                "requests": [helper.request("s") for _ in range(3)],
            }
        )
        main.time += 60.0
    else:
        main.rewrite(kept_blocks=15, length=1_300)
    requests += [main.request("n") for _ in range(3)]
    return {"id": name, "block_size": AGENT_BLOCK, "hash_id_scope": "local", "requests": requests}


def traces() -> dict[str, str]:
    """File name → content."""
    sessions = {"session_a": agent_session("session_a", 2, False), "session_b": agent_session("session_b", 3, True)}
    files = {f"{name}.json": json.dumps(session) + "\n" for name, session in sessions.items()}
    return {"chat.jsonl": "".join(json.dumps(row) + "\n" for row in chat_trace()), **files}


if __name__ == "__main__":
    for file_name, text in traces().items():
        (HERE / file_name).write_text(text, encoding="utf-8")
        print(f"{file_name}: {len(text):,} characters")
