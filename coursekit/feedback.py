"""The page a student gets: points, what came of each part and why, what to read. Nothing hidden, everything escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from coursekit.manual import Manual
from coursekit.release import write_atomically
from coursekit.result import Result, path_of

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
_WORDS = {
    "passed": "passed", "failed": "not right yet", "hidden": "not right on unseen inputs", "unsolved": "not solved",
    "error": "raised an error", "timeout": "took too long", "died": "could not be run",
    "open": "waits for your instructor", "graded": "read by your instructor",
}  # fmt: skip

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}: feedback</title>
<style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
section { border-left: 4px solid #888; padding: .1rem 1rem; margin: 1.2rem 0 }
section.passed, section.graded { border-color: #0072b2 } section.failed, section.hidden, section.error,
section.timeout, section.died { border-color: #d55e00 }
pre { white-space: pre-wrap; overflow-wrap: anywhere } h2 { font-size: 1.1rem } .score { font-size: 1.3rem }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ result.student }}{% if result.file %} · {{ result.file }}{% endif %}</p>
<p class="score">{{ "%g"|format(result.points) }} of {{ "%g"|format(result.max_points) }} points
{%- if result.waiting %}; open questions still to be read: {{ result.waiting }}{% endif %}</p>
{% if result.reason %}<p><strong>Your submission could not be graded: it {{ result.reason }}.</strong></p>{% endif %}
{% for problem in result.problems %}<p>Note: {{ problem }}.</p>{% endfor %}
{% for item in result.items %}
<section class="{{ item.outcome }}"><h2>{{ item.title }}: {{ words[item.outcome] }}
({{ "–" if item.points is none else "%g"|format(item.points) }} of {{ "%g"|format(item.max_points) }})</h2>
{% if item.message %}<pre>{{ item.message }}</pre>{% endif %}
{% if item.of %}<p>Hidden values: {{ item.right }} of {{ item.of }} right.</p>{% endif %}
{% if item.read and item.outcome not in ("passed", "graded") %}<p>To read next: {{ item.read }}</p>{% endif %}
{% if item.kind == "question" %}<pre>{{ result.answers.get(item.grade_id, "") }}</pre>
{% if comments.get(item.grade_id) %}<p>Your instructor: {{ comments[item.grade_id] }}</p>{% endif %}{% endif %}
</section>
{% endfor %}
</body></html>
"""


def write_feedback(out: Path, title: str, result: Result, manual: Mapping[tuple[str, str, str], Manual]) -> Path:
    path = path_of(out / "feedback", result.student, result.exercise, ".html")
    write_atomically(path, render(title, result, manual))
    return path


def render(title: str, result: Result, manual: Mapping[tuple[str, str, str], Manual]) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    comments = {key[2]: row.comment for key, row in manual.items() if key[:2] == (result.student, result.exercise)}
    page = environment.from_string(_PAGE).render(title=title, result=result, words=_WORDS, comments=comments)
    return _CONTROL.sub("\ufffd", page)
