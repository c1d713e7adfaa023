"""What an all-gather between processes of this machine takes: a floor for every exchange between ranks (lab 10-1).

    link = measure_link(4)       4 processes, started by torchrun: gloo on CPUs, NCCL on GPUs

`python -m torch.distributed.run --standalone --nproc-per-node=4 -m coursekit.collectives` does the same by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from mini_engine.torch_group import TorchGroup, backend_of

SMALL, LARGE = 64, 1 << 20  # bytes of each rank
REPEATS = {SMALL: 100, LARGE: 9}
PATIENCE_S = 300


class MeasuredLink(NamedTuple):
    """small_s: seconds of an all-gather of 64 bytes a rank. bandwidth: bytes a second that a rank receives in one of
    1 MiB a rank."""

    ranks: int
    small_s: float
    bandwidth: float

    @classmethod
    def of(cls, ranks: int, small_s: float, large_s: float) -> MeasuredLink:
        """From the seconds of both. In an all-gather a rank receives what each of the others has."""
        return cls(ranks, small_s, (ranks - 1) * LARGE / large_s)


def measure_link(ranks: int, device_type: str = "cpu") -> MeasuredLink:
    """Start `ranks` processes and time their collectives. Raises RuntimeError with their last words if they fail."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "coursekit.collectives", "--device", device_type]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=Path(__file__).resolve().parents[1]
    )
    if done.returncode:
        raise RuntimeError(f"the {ranks} processes failed: {done.stderr.strip()[-800:]}")
    return MeasuredLink(**json.loads(done.stdout.strip().splitlines()[-1]))


def time_all_gather(group: TorchGroup, num_bytes: int, device_type: str) -> float:
    """Median seconds of an all-gather of that many bytes a rank, as the rank sees it."""
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device_type)
    times = []
    for _ in range(REPEATS[num_bytes] + 3):
        start = time.perf_counter()
        group.all_gather(sent)
        if device_type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device_type = parser.parse_args().device
    torch.set_num_threads(1)
    group = TorchGroup.from_environment(backend_of(device_type))
    small_s, large_s = (time_all_gather(group, num_bytes, device_type) for num_bytes in (SMALL, LARGE))
    if group.rank == 0:
        print(json.dumps(MeasuredLink.of(group.size, small_s, large_s)._asdict()))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
