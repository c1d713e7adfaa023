"""The ledger of measured figures, docs/performance.md: `mini-engine ledger docs/bench --out docs/performance.md`.

Every figure comes from a report that a bench wrote (`mini-engine bench --json`, `mini_engine.bench.other_engines`), so
that machine, versions and commit stand beside it. What was tried and did not help is kept in `tried.toml`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mini_engine.bench.rows import notes
from mini_engine.errors import ConfigError

HEAD = """# Performance ledger

Written by `mini-engine ledger docs/bench --out docs/performance.md`; edit the reports in `docs/bench/`, not this page.
A share of 100 % is the bound that bytes over bandwidth, or operations over rate, set on that machine; a ratio above 1
is in our favour. Seconds of different machines, or of one machine on different days, are never compared: compare
shares and ratios.
"""


def ledger(directory: Path) -> str:
    """The page, in Markdown. Raises ConfigError for a directory without reports, or a file that is none."""
    paths = sorted(directory.glob("*.json"))
    if not paths:
        raise ConfigError(
            f"{directory} holds no report: write one with `mini-engine bench --json > {directory}/x.json`"
        )
    parts = [HEAD]
    for path in paths:
        try:
            parts.append("\n".join(_section(json.loads(path.read_text()))))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a bench report ({type(error).__name__}: {error})") from error
    tried = directory / "tried.toml"
    if tried.exists():
        parts.append("\n".join(_tried(tomllib.loads(tried.read_text())["tried"])))
    return "\n".join(parts)


def _section(report: dict[str, Any]) -> Iterator[str]:
    settings, versions = report["settings"], report["versions"]
    yield f"## {report.get('title') or settings['model'] + ' in ' + settings['dtype']}\n"
    yield f"- machine: {report['machine']['device']}"
    yield f"- versions: {', '.join(f'{name} {version}' for name, version in versions.items())}"
    yield f"- taken {report['date']} at commit {report['commit'] or 'unknown'}"
    yield (
        f"- {settings['input_len']} tokens in, {settings['output_len']} out, medians of {settings['repeats']}"
        f"{'; ' + report['note'] if report.get('note') else ''}\n"
    )
    yield "| figure | value | against | how |"
    yield "|---|---:|---|---|"
    for figure in report["figures"]:
        cells = figure["name"], f"{figure['value']:,.4g} {figure['unit']}", "; ".join(notes(figure)), figure["how"]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _tried(entries: list[dict[str, str]]) -> Iterator[str]:
    yield "## What was tried\n"
    yield "| what | figure | verdict |"
    yield "|---|---|---|"
    for entry in entries:
        yield f"| {entry['what']} | {entry['figure']} | {entry['verdict']} |"
    yield ""
