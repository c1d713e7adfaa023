"""`course grade`: every submission gets a result with a reason, whatever it is, and none disturbs another."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from coursekit import gradebook
from coursekit.errors import CourseError, SubmissionError
from coursekit.exercise import Exercise
from coursekit.feedback import write_feedback
from coursekit.kernel import Limits
from coursekit.manual import load_manual, merge, points_of, save_manual
from coursekit.reading import read_submission
from coursekit.rebuild import rebuild, reference
from coursekit.reference import expected_of
from coursekit.result import VERSION, Result, load
from coursekit.runner import Job, NotebookRun, run_notebooks
from coursekit.score import Expected, ItemResult, score
from coursekit.submissions import Entry, discover, unpack

_REFERENCE = "reference:"  # before an exercise's name: the key of its solution among the jobs


@dataclass(frozen=True)
class Options:
    """limits: of each notebook. max_bytes: of a submitted file. regrade: grade again what has a valid result."""

    limits: Limits = field(default_factory=Limits)
    jobs: int = 1
    max_bytes: int = 20_000_000
    regrade: bool = False
    roster: Path | None = None
    progress: bool = True


@dataclass(frozen=True)
class Summary:
    results: list[Result]
    kept: int
    unknown: list[str]

    @property
    def complete(self) -> bool:
        """Every submission was there and could be graded."""
        return all(result.status == "graded" for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        return {
            "complete": self.complete,
            "statuses": dict(sorted(Counter(result.status for result in self.results).items())),
            "kept_from_before": self.kept,
            "questions_waiting": sum(result.waiting for result in self.results),
            "not_graded": [
                {
                    "student": result.student,
                    "exercise": result.exercise,
                    "status": result.status,
                    "reason": result.reason,
                }
                for result in self.results
                if result.status != "graded"
            ],
            "not_in_roster": self.unknown,
        }


def grade(submissions: Path, exercises: Sequence[Exercise], out: Path, options: Options) -> Summary:
    """Grade a directory or a zip into `out`: results/, feedback/, gradebook.csv, manual.csv, items.csv, items.json.

    What `out` already holds and still applies (same file, same exercise) is kept, so an interrupted run resumes.
    Raises CourseError where nothing can be graded at all, before anything is written.
    """
    manual = load_manual(out / "manual.csv")
    people = gradebook.read_roster(options.roster) if options.roster else []
    with tempfile.TemporaryDirectory(prefix="course-in-") as unpacked:
        root = submissions
        if submissions.suffix.lower() == ".zip" and submissions.is_file():
            root = unpack(submissions, Path(unpacked), exercises, options.max_bytes)
        entries = discover(root, exercises, options.max_bytes)
        if not entries and not people:
            raise CourseError(f"{submissions} holds no submissions: no directories and no notebooks")
        roster, absent, unknown = gradebook.match(people, {entry.student: entry.canvas_id for entry in entries})
        entries += _absent(absent, entries, exercises, roster)
        results, kept = _results(entries, exercises, out, options)
    manual = merge(manual, results)
    results = [result.with_manual(points_of(manual, result.student, result.exercise)) for result in results]
    by_name = {exercise.name: exercise for exercise in exercises}
    for result in results:
        result.save(out)
        write_feedback(out, by_name[result.exercise].title, result, manual)
    shown = [exercise for exercise in exercises if any(result.exercise == exercise.name for result in results)]
    save_manual(out / "manual.csv", manual)
    gradebook.write_gradebook(out / "gradebook.csv", shown, results, roster)
    gradebook.write_items(out, results)
    return Summary(results, kept, unknown if people else [])


def _absent(
    people: Iterable[dict[str, str]], entries: Sequence[Entry], exercises: Sequence[Exercise], roster: gradebook.Roster
) -> list[Entry]:
    """Entries for those on the class list who handed in nothing; they join the roster under their name."""
    names = {entry.exercise for entry in entries} or {exercise.name for exercise in exercises}
    missing = []
    for person in people:
        student = person["Student"]
        if student in roster or any(entry.student == student for entry in entries):
            student = f"{student} ({person['ID'] or person['SIS Login ID'] or 'no submission'})"
        roster[student] = person
        missing += [Entry(student, name, None, person["ID"], reason="nothing was submitted") for name in sorted(names)]
    return missing


def _results(
    entries: Sequence[Entry], exercises: Sequence[Exercise], out: Path, options: Options
) -> tuple[list[Result], int]:
    by_name = {exercise.name: exercise for exercise in exercises}
    results: dict[tuple[str, str], Result] = {}
    waiting: dict[str, tuple[Result, Job]] = {}
    kept = 0
    for entry in entries:
        exercise = by_name[entry.exercise]
        fingerprint = _fingerprint(entry, exercise, options)
        old = None if options.regrade else load(out, entry.student, entry.exercise)
        if old and old.status == "graded" and old.fingerprint == fingerprint:
            results[entry.student, entry.exercise] = old
            kept += 1
            continue
        result, job = _prepare(entry, exercise, fingerprint, options.max_bytes, str(len(waiting)))
        results[entry.student, entry.exercise] = result
        if job:
            waiting[job.key] = (result, job)
    for result in _run(waiting, by_name, options):
        results[result.student, result.exercise] = result
        result.save(out)
    return list(results.values()), kept


def _prepare(entry: Entry, exercise: Exercise, fingerprint: str, max_bytes: int, key: str) -> tuple[Result, Job | None]:
    about = Result(
        entry.student, exercise.name, "missing", entry.reason, entry.problems, _blank(exercise),
        canvas_id=entry.canvas_id, fingerprint=fingerprint,
    )  # fmt: skip
    if entry.path is None:
        return about, None
    about = dataclasses.replace(about, file=entry.path.name.encode("utf-8", "replace").decode())
    try:
        submission = read_submission(entry.path, exercise, max_bytes)
        notebook = rebuild(exercise, submission)
    except SubmissionError as error:
        return dataclasses.replace(about, status="refused", reason=str(error)), None
    questions = {item.grade_id for item in exercise.items if item.kind == "question"}
    answers = {name: text for name, text in submission.answers.items() if name in questions}
    problems = [*entry.problems, *submission.problems]
    return dataclasses.replace(about, status="graded", problems=problems, answers=answers), Job(key, notebook)


def _run(waiting: dict[str, tuple[Result, Job]], exercises: dict[str, Exercise], options: Options) -> Iterator[Result]:
    """Run the reference solutions first, then everybody's. What ends before its reference waits for it."""
    needed = sorted({result.exercise for result, _ in waiting.values()})
    jobs = [Job(_REFERENCE + name, reference(exercises[name])) for name in needed]
    jobs += [job for _, job in waiting.values()]
    expected: dict[str, Expected] = {}
    early: dict[str, list[NotebookRun]] = {name: [] for name in needed}
    runs = run_notebooks(jobs, options.limits, options.jobs)
    for run in tqdm(runs, total=len(jobs), desc="grading", unit="notebook", disable=None if options.progress else True):
        name = run.key.removeprefix(_REFERENCE) if run.key.startswith(_REFERENCE) else waiting[run.key][0].exercise
        if run.key.startswith(_REFERENCE):
            expected[name] = expected_of(exercises[name], run)
        else:
            early[name].append(run)
        if name in expected:
            for done in early[name]:
                yield _scored(waiting[done.key][0], exercises[name], done, expected[name])
            early[name].clear()


def _scored(result: Result, exercise: Exercise, run: NotebookRun, expected: Expected) -> Result:
    if run.fate == "crashed":
        reason = "made the grader itself fail; run the same command again, and report it if it stays"
        return dataclasses.replace(result, status="crashed", reason=reason)
    return dataclasses.replace(result, items=score(exercise, run, expected), seconds=run.seconds)


def _blank(exercise: Exercise) -> list[ItemResult]:
    return [
        ItemResult(item.grade_id, item.kind, item.part, item.title, item.points, 0.0, "unsolved", read=item.read)
        for item in exercise.items
    ]


def _fingerprint(entry: Entry, exercise: Exercise, options: Options) -> str:
    digest = hashlib.sha256(f"{VERSION} {exercise.digest} {entry.path is not None} {entry.problems}".encode())
    if entry.path is not None and entry.path.is_file() and entry.path.stat().st_size <= options.max_bytes:
        digest.update(entry.path.read_bytes())
    return digest.hexdigest()
