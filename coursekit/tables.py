"""CSV that is safe to open in a spreadsheet: gradebook, manual points, statistics.

A cell that begins with = + - @ would be run as a formula there (a student may be called `=cmd()`), so text gets a
leading apostrophe, which reading takes off again. Numbers are written as numbers.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from coursekit.errors import CourseError
from coursekit.release import write_atomically

_DANGEROUS = ("=", "+", "-", "@", "\t", "\r", "\n", "'")


def escape(text: str) -> str:
    return f"'{text}" if text.startswith(_DANGEROUS) else text


def unescape(text: str) -> str:
    return text[1:] if text.startswith("'") and text[1:].startswith(_DANGEROUS) else text


def number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> None:
    """UTF-8 with a byte-order mark, without which Excel shows other letters."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    for row in [header, *rows]:
        writer.writerow([escape(cell) if isinstance(cell, str) else number(cell) for cell in row])
    write_atomically(path, "\ufeff" + text.getvalue())


def read_table(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """Rows as dictionaries. Commas or semicolons (as a spreadsheet in many languages saves them).

    Raises CourseError for a file without the needed columns.
    """
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise CourseError(f"{path.name} is not UTF-8 text: save it as 'CSV UTF-8'") from None
    except OSError as error:
        raise CourseError(f"{path} cannot be read: {error.strerror}") from None
    first = text.partition("\n")[0]
    reader = csv.DictReader(
        io.StringIO(text, newline=""), delimiter=";" if first.count(";") > first.count(",") else ","
    )
    missing = [name for name in needed if name not in (reader.fieldnames or [])]
    if missing:
        raise CourseError(
            f"{path.name} lacks the column {', '.join(missing)}; it has {', '.join(reader.fieldnames or ['none'])}"
        )
    return [{name: unescape(value or "") for name, value in row.items() if isinstance(name, str)} for row in reader]


def cell(row: Mapping[str, str], name: str) -> str:
    return row.get(name, "").strip()
