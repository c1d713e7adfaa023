"""One process of the torchrun test: the script of a user, run by every rank, which prints what it got.

arguments: the model, then a JSON of engine options; with "fail" in place of these, rank 1 raises after two tokens.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # torchrun runs this file, not a module of the tree

from mini_engine import LLM
from tests.rank_cases import TIGHT, ids, params, tokens


def main() -> None:
    model, argument = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if argument == "fail":
        stream = LLM(model, tensor_parallel_size=size).stream(ids(2, 3), params(max_tokens=200))
        for count, _ in enumerate(stream):
            if rank == 1 and count == 1:
                raise SystemExit("this rank has had enough")
        return
    llm = LLM(model, dtype="float32", tensor_parallel_size=size, **TIGHT, **json.loads(argument))
    found = {"rank": rank, "tokens": tokens(llm), "num_preemptions": llm.engine.scheduler.stats.num_preemptions}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
