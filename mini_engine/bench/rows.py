"""One measured figure, and how figures are shown: what every bench of the package reports."""

from __future__ import annotations

from typing import Any


def row(
    name: str,
    value: float,
    unit: str,
    how: str,
    bound: float | None = None,
    peer: tuple[str, float] | None = None,
    less_is_better: bool = False,
    ratio: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A JSON-able figure: name, value, unit, how; with a bound, share_of_bound; with a peer, ratio_to_peer.

    bound: what no engine can better, in `unit`. peer: (name, value in `unit`) of another engine. Shares and ratios are
    above 1 where we are better. ratio: where it is not value / peer, the median of ratios of alternating runs, say.
    """

    def against(other: float) -> float:
        return other / value if less_is_better else value / other

    report: dict[str, Any] = {"name": name, "value": value, "unit": unit, "how": how}
    if bound is not None:
        report |= {"bound": bound, "share_of_bound": against(bound)}
    if peer is not None:
        report |= {"peer_name": peer[0], "peer": peer[1], "ratio_to_peer": against(peer[1]) if ratio is None else ratio}
    return report | more


def notes(figure: dict[str, Any]) -> list[str]:
    """What a figure is set against, in words."""
    found = []
    if "share_of_bound" in figure:
        found.append(f"{figure['share_of_bound']:.0%} of the bound {figure['bound']:,.4g}")
    if "ratio_to_peer" in figure:
        found.append(f"{figure['ratio_to_peer']:.2f} x {figure['peer_name']} ({figure['peer']:,.4g})")
    return found


def table(report: dict[str, Any]) -> str:
    """A bench report for a person."""
    settings = report["settings"]
    lines = [
        f"{report['machine']['device']}; torch {report['versions']['torch']}",
        f"{settings['model']} in {settings['dtype']}, {settings['input_len']} in + {settings['output_len']} out, "
        f"medians of {settings['repeats']}",
        "",
    ]
    for figure in report["figures"]:
        line = f"{figure['name']:<38}{figure['value']:>10,.4g} {figure['unit']:<8}{'; '.join(notes(figure))}"
        lines.append(line.rstrip())
    return "\n".join(lines)
