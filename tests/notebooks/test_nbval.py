"""Every notebook runs from top to bottom, and the cells marked `nbval-check-output` still print what is stored.

nbval runs each in its own pytest, with the notebook's folder as working directory, as JupyterLab would.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(path for folder in ("chapters", "labs", "solutions") for path in (ROOT / folder).glob("*.ipynb"))
CELL_SECONDS = 300


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path) -> None:
    options = ["--nbval-lax", f"--nbval-cell-timeout={CELL_SECONDS}", "-q", "-p", "no:cacheprovider", "--no-header"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(notebook.parent), "-c", os.devnull, str(notebook)],
        cwd=notebook.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
