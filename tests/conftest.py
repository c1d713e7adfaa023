"""What holds for every test: few threads, no network, reproducible cases, GPU tests only where there is a GPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import hypothesis
import pytest

# Before anything imports torch, which reads it once. More threads than a test machine's two cores only get in each
# other's way, and sums should not depend on the machine. `make test` runs two tests at a time, on a core each.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
# Triton reads it when first imported (transformers does that): without a GPU its kernels run in its interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# No test may reach for a hub: models are built on the spot, or come from an installed package.
os.environ["HF_HUB_OFFLINE"] = "1"
# A shell starts what it runs in the background with Ctrl-C ignored, and processes hand that on: those that the tests
# interrupt would not notice.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: seconds say more about the machine than about the code. In CI the cases are the same every time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where CUDA is absent; torch is imported only when there is such a test."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        reason = f"needs a CUDA device, torch {torch.__version__} sees none"
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))
