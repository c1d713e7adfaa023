"""The same attention in processes that torchrun starts equals the whole, and LocalGroup bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("dcp_worker.py")


@pytest.mark.parametrize("size", [2, 4])
def test_processes_agree_with_threads(size):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", str(WORKER)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    assert all(f"rank {rank} of {size}: " in result.stdout for rank in range(size)), result.stdout
