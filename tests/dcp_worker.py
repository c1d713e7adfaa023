"""One process of the torchrun test: attention over gloo, against the whole and against the same in threads."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # torchrun runs this file, not a module of the tree

import torch
import torch.distributed as dist

from mini_engine.groups import Group, LocalGroup, run_ranks
from mini_engine.torch_group import TorchGroup
from tests.dcp_cases import MLA, TINY, Case, Step, run_rank

CASES = [
    Case(TINY, (1, 3, 9, 70), (1, 1, 1, 4), sharpness=2.0),
    Case(MLA, (0, 5, 64), (2, 1, 1), dtype=torch.bfloat16),
]


def collectives(group: Group) -> list[torch.Tensor]:
    x = torch.arange(24.0).view(4, 6) + 100 * group.rank
    pair = group.split(group.size).split(2)
    return [
        group.all_gather(x, dim=1),
        group.all_gather(x.bfloat16()),
        group.reduce_scatter(x.bfloat16()),
        group.all_to_all(x[: group.size]),
        group.all_reduce(x[:, :5]),
        pair.all_gather(x),
    ]


def work(group: Group) -> list[torch.Tensor]:
    found = collectives(group)
    for case, comm, q_replicate in product(CASES, ("ag_rs", "a2a"), (False, True)):
        state = run_rank(Step(case), group, 0, 1, comm, q_replicate)  # type: ignore[arg-type]
        whole, own = Step(case).whole(), case.shape.heads // group.size
        heads = slice(group.rank * own, (group.rank + 1) * own)
        tolerance = 2e-5 if case.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(state.out, whole.out[:, heads], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(state.lse, whole.lse[:, heads], rtol=tolerance, atol=tolerance)
        found += [state.out, state.lse]
    return found


def main() -> None:
    group = TorchGroup.from_environment("gloo", timeout_s=60)
    here = work(group)
    local = LocalGroup.create(group.size)
    there = run_ranks(local, work)[group.rank]
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b), "processes and threads differ"
    assert group.records == local[group.rank].records, "they moved other bytes"
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {group.rank} of {group.size}: {len(here)} tensors, {group.num_bytes} bytes")


if __name__ == "__main__":
    main()
