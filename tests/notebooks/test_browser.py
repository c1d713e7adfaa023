"""A chapter in a real JupyterLab, in a real browser: it runs, a slider is dragged, and the plot is another one."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from browser import Page, chromium, find_chromium, jupyterlab, wait_until

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = "03_continuous_batching.ipynb"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine (Debian: apt install chromium)"),
    pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is None, reason="JupyterLab is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("websocket") is None, reason="websocket-client is not installed"),
]

NOTEBOOK = (
    "[...window.jupyterapp.shell.widgets('main')].find(widget => widget.sessionContext && widget.content.widgets)"
)
CELLS = f"{NOTEBOOK}.content.widgets"
PLAYGROUND = f"{CELLS}.find(cell => cell.model.sharedModel.id === 'playground')"
PICTURE = f"{PLAYGROUND}.node.querySelector('img')"


def test_a_slider_changes_the_plot(tmp_path: Path) -> None:
    book, lab, profile = (tmp_path / name for name in ("course", "lab", "browser"))
    for path in (book / "chapters", book / "labs", lab, profile):
        path.mkdir(parents=True)
    shutil.copy(ROOT / "chapters" / CHAPTER, book / "chapters")
    shutil.copytree(ROOT / "labs" / "records", book / "labs" / "records")
    with jupyterlab(book, lab, ROOT) as address, chromium(profile) as page:
        open_and_run(page, address.format(f"chapters/{CHAPTER}"))
        assert errors(page) == []

        before = plot(page)
        assert "376.0 ms" in before["alt"], before["alt"]  # the book's figure, drawn by the widget
        screenshot(page, tmp_path / "before.png")
        drag_largest_chunk(page)
        after = wait_until(lambda: (now := plot(page)) and now["src"] != before["src"] and now, "another plot")
        screenshot(page, tmp_path / "after.png")
        assert longest_gap(after["alt"]) < longest_gap(before["alt"])
        assert after["width"] > 300


def open_and_run(page: Page, address: str) -> None:
    page.command("Page.navigate", url=address)
    page.wait_for("Boolean(window.jupyterapp && window.jupyterapp.shell)")
    page.wait_for(f"Boolean({NOTEBOOK}?.content.widgets.length)")
    page.wait_for(f"{NOTEBOOK}.sessionContext.session?.kernel?.status === 'idle'")
    page.evaluate(f"window.jupyterapp.shell.activateById({NOTEBOOK}.id)")  # a command acts on the current widget
    page.wait_for("Boolean(window.jupyterapp.shell.currentWidget?.sessionContext)")
    run = "window.jupyterapp.commands.execute('notebook:run-all-cells')"
    page.evaluate(f"void {run}.finally(() => {{ window.ranAll = true; }})")
    page.wait_for("window.ranAll === true")


def errors(page: Page) -> list[str]:
    outputs = f"{CELLS}.flatMap(cell => cell.model.outputs ? cell.model.outputs.toJSON() : [])"
    found: list[str] = json.loads(
        page.evaluate(f"JSON.stringify({outputs}.filter(o => o.output_type === 'error').map(o => o.evalue))")
    )
    return found


def plot(page: Page) -> dict:
    """The playground's picture: alt, src, width in pixels. Scrolled to, since JupyterLab draws what is in view."""
    page.evaluate(f"{NOTEBOOK}.content.scrollToCell({PLAYGROUND}, 'start')")
    page.wait_for(f"Boolean({PICTURE} && {PICTURE}.complete && {PICTURE}.naturalWidth)")
    shown: dict = json.loads(
        page.evaluate(f"(p => JSON.stringify({{alt: p.alt, src: p.src, width: p.clientWidth}}))({PICTURE})")
    )
    return shown


def drag_largest_chunk(page: Page) -> None:
    """The last slider of the playground, from "no limit" to about the middle."""
    sliders = f"[...{PLAYGROUND}.node.querySelectorAll('.noUi-target')]"
    handle = f"{sliders}.at(-1).querySelector('.noUi-handle').getBoundingClientRect()"
    x, y = json.loads(page.evaluate(f"(h => JSON.stringify([h.x + h.width / 2, h.y + h.height / 2]))({handle})"))
    width = page.evaluate(f"{sliders}.at(-1).getBoundingClientRect().width")
    page.drag(x, y, by=width * 0.45)


def longest_gap(alt: str) -> float:
    return float(alt.split("the longest gap between two tokens is ")[1].split(" ms")[0])


def screenshot(page: Page, path: Path) -> None:
    path.write_bytes(base64.b64decode(page.command("Page.captureScreenshot")["data"]))
