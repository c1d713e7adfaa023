"""The process a notebook's code runs in: limits first, then ipykernel.

    python -P -m coursekit.kernel_main CONNECTION_FILE '{"memory_bytes": …, "file_bytes": …, "cpu_seconds": …}'

Imports nothing of the grader: what is not in this process cannot be read by the code that runs in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import sys
from collections.abc import Mapping


def limit(limits: Mapping[str, int]) -> None:
    """Hard limits, which the process cannot lift again. What a system does not know (macOS: memory) stays open."""
    import resource

    wanted = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_CORE: 0,
    }
    for name, value in wanted.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (value, value))
    # A write beyond the limit is then an OSError in the cell and not the end of the kernel.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def die_with_parent() -> None:
    """On Linux, a grader that is killed takes its kernels with it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> None:
    connection_file, limits = sys.argv[1], json.loads(sys.argv[2])
    die_with_parent()
    from ipykernel.kernelapp import IPKernelApp

    limit(limits)
    IPKernelApp.launch_instance(argv=["-f", connection_file, "--HistoryManager.enabled=False", "--log-level=50"])


if __name__ == "__main__":
    main()
