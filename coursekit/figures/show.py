"""How a figure is put into a notebook: one look, an alternative text, readable on light and dark pages."""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito 2008, "Color universal design": told apart with every common colour vision.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
INK, PAPER, GRID = "#222222", "#FCFCFA", "#D9D9D4"


def new_figure(width: float = 8.0, height: float = 4.0) -> Figure:
    """An empty figure, size in inches, on paper of its own: dark themes then leave its text readable."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")


def ink_on(shade: str) -> str:
    """Black or white, whichever is easier to read on `shade` (relative luminance of WCAG 2)."""
    channels = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#FFFFFF" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def style(axes, title: str, x: str, y: str) -> None:
    """Title, axis labels with units, and quiet lines."""
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.set_facecolor(PAPER)
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)


def show(figure: Figure, alt: str) -> None:
    """Display `figure` as an image whose alternative text says what is to be seen in it."""
    from IPython.display import HTML, display

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    display(HTML(f'<img alt="{html.escape(alt)}" style="max-width:100%" src="data:image/png;base64,{data}">'))
