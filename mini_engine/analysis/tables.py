"""Read the tables of cards, links and models that ship as TOML beside this package."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from mini_engine.analysis.inputs import AnalysisError


def read_table(name: str) -> dict[str, Any]:
    """The content of data/<name>.toml."""
    path = Path(__file__).with_name("data") / f"{name}.toml"
    with path.open("rb") as file:
        return tomllib.load(file)


def entry(table: dict[str, Any], name: str, kind: str) -> dict[str, Any]:
    """One entry of a table. Raises AnalysisError with the names there are."""
    if name not in table:
        raise AnalysisError(f"{kind} {name!r} is not in the table, which has {', '.join(table)}")
    return dict(table[name])
