"""`course run`: execute notebooks in place and store them so that a second run changes nothing."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from coursekit.cells import KERNELSPEC, dumps
from coursekit.errors import CourseError
from coursekit.release import write_atomically

_RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4,})*")
_WIDGET = "application/vnd.jupyter.widget-view+json"
_CELL_KEYS = ("nbgrader", "textbook", "tags", "jupyter")


@dataclass(frozen=True)
class Ran:
    """One notebook: changed on disk or not, and what stopped it ("" where it ran through; the file stays as it was)."""

    path: Path
    changed: bool
    error: str = ""


def find(names: Sequence[str]) -> list[Path]:
    """Notebooks in the named directories, or the named notebooks. Raises CourseError where a name leads to none."""
    paths: list[Path] = []
    for name in names:
        place = Path(name)
        found = sorted(place.glob("*.ipynb")) if place.is_dir() else [place] if place.is_file() else []
        if not found:
            raise CourseError(f"no notebook at {name}: name a directory with notebooks, or a notebook")
        paths += found
    return paths


def run_in_place(path: Path, cell_seconds: float, on_cell: Callable[[], None] = lambda: None) -> Ran:
    """Execute a notebook in its own directory. on_cell is called after each code cell.

    Raises CourseError for a file that is no notebook. A notebook that fails is left as it was.
    """
    try:
        before = path.read_text("utf-8")
        book = nbformat.reads(before, as_version=4)
    except Exception as error:
        raise CourseError(f"{path} cannot be read as a notebook: {error}") from None
    try:
        _execute(book, path.resolve().parent, cell_seconds, on_cell)
    except CellExecutionError as error:
        return Ran(path, False, f"{error.ename}: {error.evalue}")
    except CellTimeoutError:
        return Ran(path, False, f"a cell took longer than {cell_seconds:g} s")
    except (DeadKernelError, RuntimeError) as error:
        return Ran(path, False, f"the kernel died: {error}")
    after = dumps(normalised(book))
    if after != before:
        write_atomically(path, after)
    return Ran(path, after != before)


def _execute(book: NotebookNode, directory: Path, cell_seconds: float, on_cell: Callable[[], None]) -> None:
    root = str(Path(__file__).resolve().parent.parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
    # Widget state is kept while it runs, since nbclient's Output widget fails without it; `normalised` drops it.
    client = NotebookClient(
        book, timeout=cell_seconds, kernel_name="python3", record_timing=False, store_widget_state=True,
        resources={"metadata": {"path": str(directory)}}, on_cell_executed=lambda **_: on_cell(),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="course-run-") as private:
        manager = client.create_kernel_manager()
        manager.transport, manager.ip = (
            "ipc",
            str(Path(private, "s")),
        )  # sockets as files: no ports, seen by nobody else
        client.execute(env=env)


def normalised(book: NotebookNode) -> NotebookNode:
    """Format 4.5, readable ids that stay, counts from 1, joined streams; no widget state, no times, no chance ids."""
    book = copy.deepcopy(book)
    kept = {"textbook": book.metadata["textbook"]} if "textbook" in book.metadata else {}
    book.metadata = NotebookNode(kernelspec=dict(KERNELSPEC), language_info={"name": "python"}, **kept)
    taken = {cell.get("id", "") for cell in book.cells}
    count = 0
    for index, cell in enumerate(book.cells):
        if not cell.get("id") or _RANDOM_ID.fullmatch(cell["id"]):
            cell["id"] = next(name for name in _names(index) if name not in taken)
            taken.add(cell["id"])
        cell.metadata = NotebookNode({key: cell.metadata[key] for key in _CELL_KEYS if key in cell.metadata})
        if cell.cell_type == "code":
            cell.outputs = _outputs(cell.outputs)
            if cell.source.strip():
                count += 1
            cell.execution_count = count if cell.source.strip() else None
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = cell.execution_count
    return book


def _names(index: int) -> Sequence[str]:
    return [f"cell-{index}", *(f"cell-{index}-{more}" for more in range(2, 100))]


def _outputs(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    kept: list[NotebookNode] = []
    for output in outputs:
        last = kept[-1] if kept else None
        if output.output_type == "stream" and last is not None and last.get("name") == output.name:
            last.text += output.text
            continue
        if _WIDGET in output.get("data", {}):
            # Without its state a widget is only an error message; a static picture beside it is worth keeping.
            data = {kind: content for kind, content in output.data.items() if kind not in (_WIDGET, "text/plain")}
            if not data:
                continue
            output.data = NotebookNode(data)
        kept.append(output)
    return kept
