"""The rules of the repository itself. The finders are small functions, so that they are seen to find something."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 1_000_000
MAX_LINES = 400

# In two parts each, so that this file is not one that names them. PyTorch's index of CPU builds is the one exception.
REGISTRIES = [
    first + second
    for first, second in [
        ("pypi", ".org"),
        ("pypi.", "python.org"),
        ("pythonhosted", ".org"),
        ("npmjs", ".org"),
        ("npmjs", ".com"),
        ("yarnpkg", ".com"),
        ("deb.debian", ".org"),
        ("archive.ubuntu", ".com"),
        ("anaconda", ".org"),
        ("anaconda", ".com"),
        ("crates", ".io"),
        ("proxy.golang", ".org"),
    ]
]
INDEX_OPTION = re.compile(r"(?:index-url|find-links)[\s=\"',]+(?:https?|file)://(?!download\.pytorch\.org/)\S+")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+|opt/(?:pypi|wheels))/")

# Torch takes a second to import; the arithmetic, the scheduler and the grading must not pay it.
WITHOUT_TORCH = [
    "mini_engine",
    *(f"mini_engine.{name}" for name in ("errors", "config", "sequence", "block_manager", "scheduler")),
    *(f"mini_engine.{name}" for name in ("block", "block_pool", "eviction", "popularity")),
    *(f"mini_engine.{name}" for name in ("host_tier", "prefix_tier", "transfer", "decisions", "context_shard")),
]
WITHOUT_TORCH_PACKAGES = ("analysis", "simulator")


def repository_files() -> list[Path]:
    """What git tracks, or would track next."""
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    paths = [ROOT / name for name in sorted(set(listing.stdout.split("\0"))) if name]
    return [path for path in paths if path.is_file()]


def forbidden_in(text: str) -> list[str]:
    """Hosts of package registries, other indexes than PyTorch's, and paths of somebody's machine."""
    hosts = [host for host in REGISTRIES if host in text]
    return hosts + INDEX_OPTION.findall(text) + MACHINE_PATH.findall(text)


def notebook_problems(text: str) -> list[str]:
    """Why this is no notebook to publish: format 4.5 with unique cell ids, no stored error."""
    notebook = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
    version = (notebook.get("nbformat"), notebook.get("nbformat_minor"))
    if version < (4, 5):
        return [f"format {version[0]}.{version[1]}, cell ids need 4.5"]
    problems = []
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        problems.append(error.message)
    ids = [cell.get("id") for cell in notebook.cells]
    if len(set(ids)) < len(ids) or None in ids:
        problems.append("cells without an id of their own")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return problems + [f"stored error: {output['ename']}" for output in outputs if output["output_type"] == "error"]


def torch_free_modules() -> list[str]:
    """The fixed list, and every module of the packages that exist by now."""
    found = []
    for package in WITHOUT_TORCH_PACKAGES:
        for path in sorted((ROOT / "mini_engine" / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return WITHOUT_TORCH + found


def torch_imports(source: str) -> list[int]:
    """Lines that import torch, wherever they stand."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if any(name.split(".")[0] == "torch" for name in names):
                found.append(node.lineno)
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_large_files():
    assert {relative(path): path.stat().st_size for path in repository_files() if path.stat().st_size > MAX_BYTES} == {}


def test_python_files_are_short():
    lengths = {
        relative(path): len(path.read_bytes().splitlines()) for path in repository_files() if path.suffix == ".py"
    }
    assert lengths and {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_registry_hosts_and_no_machine_paths():
    texts = {relative(path): path.read_bytes().decode("utf-8", errors="replace") for path in repository_files()}
    assert {name: found for name, text in texts.items() if (found := forbidden_in(text))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "https://" + "pypi" + ".org/simple",
        "pip --index-url " + "https://mirror.example/simple torch",
        "see " + "/home" + "/jane/models",
        "(" + "/work" + "/main)",
    ],
)
def test_forbidden_text_is_found(text):
    assert forbidden_in(text)


@pytest.mark.parametrize(
    "text",
    ["--index-url https://download.pytorch.org/whl/cpu", f"a/{'work'}/b", "https://github.com/x/home/y/", "pypi"],
)
def test_allowed_text_is_allowed(text):
    assert forbidden_in(text) == []


def test_notebooks_are_clean():
    notebooks = [path for path in repository_files() if path.suffix == ".ipynb"]
    found = {relative(path): notebook_problems(path.read_text(encoding="utf-8")) for path in notebooks}
    assert {name: problems for name, problems in found.items() if problems} == {}


def notebook(minor: int = 5, **cell: object) -> str:
    cells = [
        {"cell_type": "code", "id": "a", "metadata": {}, "source": "1", "outputs": [], "execution_count": None, **cell}
    ]
    return json.dumps({"nbformat": 4, "nbformat_minor": minor, "metadata": {}, "cells": cells})


def test_a_clean_notebook_passes():
    assert notebook_problems(notebook()) == []


@pytest.mark.parametrize(
    "text, says",
    [
        (notebook(minor=4), "4.5"),
        (notebook(id=None), "id"),
        (notebook(execution_count="one"), "one"),
        (notebook(outputs=[{"output_type": "error", "ename": "KeyError", "evalue": "", "traceback": []}]), "KeyError"),
    ],
)
def test_notebook_problems_are_found(text, says):
    assert says in " ".join(notebook_problems(text))


def test_imports_without_torch():
    """One fresh interpreter for all of them: it stops at the first module that brings torch in."""
    script = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""
    command = [sys.executable, "-c", script, *torch_free_modules()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_no_torch_inside_functions():
    """An import inside a function would pass the test above and still be paid on the first call."""
    paths = [ROOT / name.replace(".", "/") for name in torch_free_modules()]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    found = {relative(path): torch_imports(path.read_text(encoding="utf-8")) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_torch_imports_are_found():
    assert torch_imports("import os, torch.nn\ndef f():\n    from torch import nn\nimport torchless") == [1, 3]
