"""The `course` command. Exit codes: 0 all is well, 1 something was found (see each command), 2 it could not be done."""

from __future__ import annotations

import coursekit.startup  # noqa: F401

# isort: split
import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nbformat
from tqdm import tqdm

from coursekit import bundle, check, grade, release, run
from coursekit.errors import CourseError
from coursekit.kernel import Limits

_EPILOG = """examples:
  course check                        check all exercises in ./exercises
  course check ex_8_1                 one of them; in a notebook cell: !course check ex_8_1
  course run chapters labs            execute notebooks and store their outputs
  course release                      write exercises/ from solutions/
  course release --check              is exercises/ in step? (for CI)
  course release --bundle student.zip the edition to hand out
  course grade submissions/ --out graded --jobs 4

`course COMMAND --help` tells more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(argv)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except CourseError as error:
        print(f"course: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ncourse: interrupted; what is done is kept, and the same command goes on from there", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, say) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "course", description="Release, check, run and grade notebooks.", epilog=_EPILOG, formatter_class=raw
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: object, about: str, examples: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=about, description=about, epilog=f"examples:\n{examples}", formatter_class=raw
        )
        sub.set_defaults(command=function)
        sub.add_argument("--json", action="store_true", help="print JSON for a program to read, and no progress")
        return sub

    sub = command(
        "release", _release, "Write the exercises students open from the solutions (exit 1: --check differs).",
        "  course release\n  course release ex_8_1\n  course release --check\n  course release --bundle student.zip",
    )  # fmt: skip
    sub.add_argument("names", nargs="*", metavar="EXERCISE", help="which ones (default: all)")
    sub.add_argument("--check", action="store_true", help="write nothing; fail when an exercise is out of step")
    sub.add_argument("--bundle", type=Path, metavar="ZIP", help="write the student edition of the course in --root")
    sub.add_argument("--root", type=Path, default=Path(), help="the course's directory, for --bundle (default: here)")
    _directories(sub)
    sub = command(
        "check", _check, "Check your own exercises (exit 1: a part does not pass yet).",
        "  course check\n  course check ex_8_1\n  course check ~/Downloads/ex_8_1.ipynb --json",
    )  # fmt: skip
    sub.add_argument("names", nargs="*", metavar="EXERCISE", help="a name or a file (default: all in --exercises)")
    sub.add_argument("--exercises", type=Path, default=None, help="default: ./exercises, or here where that is not")
    _limits(sub, jobs=1)
    sub = command(
        "run", _run, "Execute notebooks in place, stored so that a second run changes nothing (exit 1: one fails).",
        "  course run chapters\n  course run chapters/02_batching_roofline.ipynb --timeout 60",
    )  # fmt: skip
    sub.add_argument("names", nargs="+", metavar="DIRECTORY|NOTEBOOK")
    sub.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds for one cell (default: 600)")
    sub = command(
        "grade", _grade, "Grade a class (exit 1: a submission is missing or could not be graded; the rest is).",
        "  course grade submissions/ --out graded --jobs 4\n"
        "  course grade canvas.zip --exercise ex_8_1 --roster class.csv --out graded\n"
        "  course grade submissions/ --out graded             again: goes on, or takes in graded/manual.csv\n"
        "  course grade submissions/ --out graded --regrade   all anew, manual points kept",
    )  # fmt: skip
    sub.add_argument("submissions", type=Path, help="a directory per student, a flat folder, or a zip of either")
    sub.add_argument("--out", type=Path, required=True, help="where results, feedback and tables go")
    sub.add_argument(
        "--exercise", action="append", metavar="NAME", help="grade this one (may be repeated; default: all)"
    )
    sub.add_argument(
        "--roster", type=Path, metavar="CSV", help="class list exported from Canvas, to find who is missing"
    )
    sub.add_argument("--regrade", action="store_true", help="grade again what already has a result")
    sub.add_argument("--max-mb", type=float, default=20, help="largest notebook accepted (default: 20)")
    _directories(sub)
    _limits(sub, jobs=max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    return parser


def _directories(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--solutions", type=Path, default=Path("solutions"), help="default: ./solutions")
    sub.add_argument("--exercises", type=Path, default=Path("exercises"), help="default: ./exercises")


def _limits(sub: argparse.ArgumentParser, jobs: int) -> None:
    own = Limits()
    sub.add_argument("--jobs", type=_positive(int), default=jobs, help=f"notebooks at a time (default: {jobs})")
    sub.add_argument(
        "--cell-timeout",
        type=_positive(float),
        default=own.cell_seconds,
        metavar="S",
        help="seconds for a cell (default: %(default)g)",
    )
    sub.add_argument(
        "--timeout",
        type=_positive(float),
        default=own.notebook_seconds,
        metavar="S",
        help="seconds for a notebook (default: %(default)g)",
    )
    sub.add_argument(
        "--memory-mb",
        type=_positive(int),
        default=own.memory_bytes >> 20,
        metavar="MB",
        help="for a kernel (default: %(default)s)",
    )


def _positive(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < 1e9:
            raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
        return value

    parse.__name__ = kind.__name__
    return parse


def _limits_of(options: argparse.Namespace) -> Limits:
    return Limits(
        cell_seconds=options.cell_timeout, notebook_seconds=options.timeout, memory_bytes=options.memory_mb << 20
    )


def _release(options: argparse.Namespace) -> int:
    places = (options.solutions, options.exercises)
    if options.check:
        reasons = release.out_of_step(*places, options.names)
        _say(options, {"in_step": not reasons, "reasons": reasons}, reasons or ["all exercises are in step"])
        return 1 if reasons else 0
    if options.bundle:
        names = bundle.bundle(options.root, *places, options.bundle)
        _say(options, {"bundle": str(options.bundle), "files": names}, [f"{options.bundle}: {len(names)} files"])
        return 0
    changed = [str(path) for path in release.release(*places, options.names)]
    _say(options, {"changed": changed}, [f"wrote {path}" for path in changed] or ["nothing has changed"])
    return 0


def _check(options: argparse.Namespace) -> int:
    directory = options.exercises or (Path("exercises") if Path("exercises").is_dir() else Path())
    paths = check.find(options.names, directory)
    done = check.check(paths, _limits_of(options), options.jobs, progress=not options.json)
    _say(options, [checked.to_dict() for checked in done], [check.report(checked) for checked in done])
    return 0 if all(checked.passed for checked in done) else 1


def _run(options: argparse.Namespace) -> int:
    paths = run.find(options.names)
    cells = sum(cell.cell_type == "code" for path in paths for cell in nbformat.read(path, as_version=4).cells)
    done = []
    with tqdm(total=cells, unit="cell", disable=True if options.json else None) as bar:
        for path in paths:
            bar.set_description(path.stem)
            done.append(run.run_in_place(path, options.timeout, bar.update))
    values = [{"notebook": str(ran.path), "changed": ran.changed, "error": ran.error} for ran in done]
    words = [f"{ran.path}: {ran.error or ('changed' if ran.changed else 'as before')}" for ran in done]
    _say(options, values, words)
    return 1 if any(ran.error for ran in done) else 0


def _grade(options: argparse.Namespace) -> int:
    exercises = release.find_exercises(options.solutions, options.exercise)
    how = grade.Options(
        _limits_of(options), options.jobs, int(options.max_mb * 1e6), options.regrade, options.roster, not options.json
    )
    summary = grade.grade(options.submissions, exercises, options.out, how)
    values = summary.to_dict()
    words = [f"{count} {status}" for status, count in values["statuses"].items()]
    lines = [f"{', '.join(words)} ({summary.kept} kept from before); see {options.out}/gradebook.csv"]
    lines += [
        f"  {row['student']}, {row['exercise']}: {row['status']}, {row['reason']}" for row in values["not_graded"]
    ]
    lines += [f"  {name}: not in the roster" for name in summary.unknown]
    if values["questions_waiting"]:
        waiting = f"{values['questions_waiting']} open answers wait for points"
        lines.append(f"{waiting}: fill in {options.out}/manual.csv, then run this again")
    _say(options, values, lines)
    return 0 if summary.complete else 1


def _say(options: argparse.Namespace, values: object, lines: Sequence[str]) -> None:
    print(json.dumps(values, indent=1, ensure_ascii=False) if options.json else "\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
