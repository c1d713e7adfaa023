"""The warm-up tells right from wrong: unsolved, solved, and the usual mistakes with the sentence that fits each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from coursekit.authoring import UNSOLVED, failures, try_answers
from coursekit.exercise import Exercise
from coursekit.release import out_of_step
from coursekit.score import ItemResult

ROOT = Path(__file__).resolve().parents[2]
NAME = "ex_8_0_life_of_a_request"
SOLUTION = ROOT / "solutions" / f"{NAME}.ipynb"

COUNTS = """


def counts(run, once):
    most, again = max(r.num_running for r in run.rounds), run.stats.num_scheduled_tokens - once
    return {"most_running": most, "preemptions": run.stats.num_preemptions, "recomputed": again}
"""
KV = "def kv_blocks(capacity_gib, model, work_gib, block_size=16):\n    return "
QUEUE = "def bearable_queue(prefill_s, gap_s, outputs, deadline_s, inserted=0, mixed_s=None):\n    "
# (part, what the student did, answer, what the check must say of it)
WRONG: list[tuple[str, str, str, str]] = [
    (
        "a",
        "GB for GiB",
        "def kv_blocks(capacity_gib, model, work_gib, block_size=16):\n"
        "    left = (capacity_gib - work_gib) * 10**9 - weight_bytes(model)\n"
        "    return int(max(0, left) // block_bytes(model, block_size))",
        "GB (10**9) are taken for GiB",
    ),
    (
        "a",
        "weights read for weights resident",
        "def kv_blocks(capacity_gib, model, work_gib, block_size=16):\n"
        "    from mini_engine.analysis import weight_read_bytes\n"
        "    left = int((capacity_gib - work_gib) * GiB) - weight_read_bytes(model)\n"
        "    return max(0, left) // block_bytes(model, block_size)",
        "bytes read in a round",
    ),
    (
        "a",
        "fewer blocks than none",
        "def kv_blocks(capacity_gib, model, work_gib, block_size=16):\n"
        "    left = int((capacity_gib - work_gib) * GiB) - weight_bytes(model)\n"
        "    return left // block_bytes(model, block_size)",
        "certainly not fewer than none",
    ),
    (
        "a",
        "blocks of 16 only",
        "def kv_blocks(capacity_gib, model, work_gib, block_size=16):\n"
        "    left = int((capacity_gib - work_gib) * GiB) - weight_bytes(model)\n"
        "    return max(0, left) // block_bytes(model)",
        "block_size is not used",
    ),
    (
        "b",
        "last output in KV",
        "def blocks_at_end(prompt, output, block_size=16):\n    return -(-(prompt + output) // block_size)",
        "the last output token is counted into KV",
    ),
    (
        "b",
        "rounded down",
        "def blocks_at_end(prompt, output, block_size=16):\n    return (prompt + output - 1) // block_size",
        "is rounded down",
    ),
    (
        "b",
        "not rounded",
        "def blocks_at_end(prompt, output, block_size=16):\n    return (prompt + output - 1) / block_size",
        "not rounded at all",
    ),
    (
        "b",
        "two tokens too few",
        "import math\n\n\n"
        "def blocks_at_end(prompt, output, block_size=16):\n    return math.ceil((prompt + output - 2) / block_size)",
        "two tokens are taken off",
    ),
    (
        "b",
        "no import",
        "def blocks_at_end(prompt, output, block_size=16):\n    return math.ceil((prompt + output - 1) / block_size)",
        "raised NameError in blocks_at_end, at `return math.ceil((prompt + output - 1) / block_size)`",
    ),
    *(("a", name, KV + formula, says) for name, formula, says in (
        ("not rounded", "max(0, (capacity_gib - work_gib) * GiB - weight_bytes(model)) / "
         "block_bytes(model, block_size)",
         "is not rounded down"),
        ("no weights", "(capacity_gib - work_gib) * GiB // block_bytes(model, block_size)", "weights are forgotten"),
        ("work space added", "max(0, (capacity_gib + work_gib) * GiB - weight_bytes(model)) // "
         "block_bytes(model, block_size)", "the work space is added"),
        ("GiB as they are", "(capacity_gib - work_gib - weight_bytes(model)) // block_bytes(model, block_size)",
         "GiB are not turned into bytes"),
        ("GiB as they are, not below 0", "max(0, capacity_gib - work_gib - weight_bytes(model)) // "
         "block_bytes(model, block_size)", "GiB are not turned into bytes (times GiB), and so nothing is left"),
    )),
    (
        "c",
        "newest output in KV already",
        "def outputs_when_dry(blocks, requests, prompt, block_size=16):\n"
        "    return blocks // requests * block_size - prompt",
        "taken to be in KV already",
    ),
    (
        "c",
        "split blocks",
        "def outputs_when_dry(blocks, requests, prompt, block_size=16):\n"
        "    return blocks * block_size // requests - prompt + 1",
        "blocks are split between requests",
    ),
    (
        "d",
        "clock from zero",
        "def user_figures(arrival, token_times):\n"
        "    gaps = [b - a for a, b in zip(token_times, token_times[1:])]\n"
        '    return {"ttft": token_times[0], "longest_gap": max(gaps, default=0.0), "total": token_times[-1],\n'
        '            "gaps": len(gaps)}',
        "times are counted from 0",
    ),
    (
        "d",
        "256 gaps",
        "def user_figures(arrival, token_times):\n"
        "    gaps = [b - a for a, b in zip(token_times, token_times[1:])]\n"
        '    return {"ttft": token_times[0] - arrival, "longest_gap": max(gaps, default=0.0),\n'
        '            "total": token_times[-1] - arrival, "gaps": len(token_times)}',
        "as many gaps as tokens",
    ),
    (
        "d",
        "longest of no gaps",
        "def user_figures(arrival, token_times):\n"
        "    gaps = [b - a for a, b in zip(token_times, token_times[1:])]\n"
        "    longest = max(gaps)\n"
        '    return {"ttft": token_times[0] - arrival, "longest_gap": longest, "total": token_times[-1] - arrival,\n'
        '            "gaps": len(gaps)}',
        "of a request of one token raised ValueError in user_figures, at `longest = max(gaps)`",
    ),
    (
        "e",
        "256 gaps",
        "def bearable_queue(prefill_s, gap_s, outputs, deadline_s, inserted=0, mixed_s=None):\n"
        "    extra = prefill_s if mixed_s is None else mixed_s - gap_s\n"
        "    return deadline_s - prefill_s - outputs * gap_s - inserted * extra",
        "given 256 gaps",
    ),
    (
        "e",
        "mixed round on top",
        "def bearable_queue(prefill_s, gap_s, outputs, deadline_s, inserted=0, mixed_s=None):\n"
        "    extra = prefill_s if mixed_s is None else mixed_s\n"
        "    return deadline_s - prefill_s - (outputs - 1) * gap_s - inserted * extra",
        "added on top of the gap",
    ),
    *(("e", name, QUEUE + code, says) for name, code, says in (
        ("gap off a round of its own", "extra = (prefill_s if mixed_s is None else mixed_s) - gap_s\n"
         "    return deadline_s - prefill_s - (outputs - 1) * gap_s - inserted * extra",
         "a gap is taken off a round of its own too"),
        ("sign", "extra = prefill_s if mixed_s is None else mixed_s - gap_s\n"
         "    return prefill_s + (outputs - 1) * gap_s + inserted * extra - deadline_s", "less the deadline"),
        ("inserted work added", "extra = prefill_s if mixed_s is None else mixed_s - gap_s\n"
         "    return deadline_s - prefill_s - (outputs - 1) * gap_s + inserted * extra", "is added to what is left"),
    )),
    (
        "e",
        "never late",
        "def bearable_queue(prefill_s, gap_s, outputs, deadline_s, inserted=0, mixed_s=None):\n"
        "    extra = prefill_s if mixed_s is None else mixed_s - gap_s\n"
        "    return max(0, deadline_s - prefill_s - (outputs - 1) * gap_s - inserted * extra)",
        "a negative answer is cut off at 0",
    ),
    (
        "f",
        "last output computed",
        "def admission_cost(admission, workload, config):\n"
        "    run = simulate(workload, replace(config, admission=admission), BOOK_STEP)\n"
        "    once = sum(r.num_prompt_tokens + r.num_output_tokens for r in workload)\n"
        "    return counts(run, once)" + COUNTS,
        "last output token of each request is counted as computed",
    ),
    (
        "f",
        "policy not handed over",
        "def admission_cost(admission, workload, config):\n"
        "    run = simulate(workload, config, BOOK_STEP)\n"
        "    once = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in workload)\n"
        "    return counts(run, once)" + COUNTS,
        "policy is not handed to the scheduler",
    ),
    (
        "f",
        "cost left out",
        "def admission_cost(admission, workload, config):\n    run = simulate(workload, admission)\n"
        "    return counts(run, 0)" + COUNTS,
        "at `run = simulate(workload, admission)`: simulate() missing 1 required positional argument: 'cost'. The line "
        "calls a function with other arguments",
    ),
    (
        "f",
        "frozen config assigned to",
        "def admission_cost(admission, workload, config):\n    config.admission = admission\n"
        "    run = simulate(workload, config, BOOK_STEP)\n    return counts(run, 0)" + COUNTS,
        "raised FrozenInstanceError in admission_cost, at `config.admission = admission`",
    ),
]  # fmt: skip
# Answers that satisfy every visible check and are caught on unseen inputs.
NARROW = {
    "answer-a": "def kv_blocks(capacity_gib, model, work_gib, block_size=16):\n"
    "    left = int((capacity_gib - work_gib) * GiB) - weight_bytes(QWEN3_8B)\n"
    "    return max(0, left) // block_bytes(QWEN3_8B, block_size)",
    "answer-b": "def blocks_at_end(prompt, output, block_size=16):\n"
    "    return {(241, 16): 143, (256, 16): 144, (4, 16): 1, (256, 64): 36}.get((output, block_size), 144)",
    "answer-f": "def admission_cost(admission, workload, config):\n"
    '    return {"preempt": {"most_running": 42, "preemptions": 5, "recomputed": 10845},\n'
    '            "reserve": {"most_running": 37, "preemptions": 0, "recomputed": 0}}[admission]',
}
Results = dict[str, dict[str, ItemResult]]


@pytest.fixture(scope="module")
def runs() -> Results:
    variants = {f"{part}: {name}": {f"answer-{part}": source} for part, name, source, _ in WRONG}
    return try_answers(SOLUTION, {"unsolved": UNSOLVED, "solved": {}, "narrow": NARROW, **variants})


def test_unsolved_says_so_kindly(runs: Results) -> None:
    messages = failures(runs["unsolved"])
    assert sorted(messages) == [f"check-{part}" for part in "abcdef"]
    assert all(
        message.startswith("Not solved yet") and "The notebook has a hint" in message for message in messages.values()
    )


def test_solved_passes_with_all_points(runs: Results) -> None:
    assert failures(runs["solved"]) == {}
    assert sum(item.points or 0 for item in runs["solved"].values()) == 10


@pytest.mark.parametrize("part, name, says", [(part, name, says) for part, name, _, says in WRONG])
def test_a_usual_mistake_is_named(runs: Results, part: str, name: str, says: str) -> None:
    messages = failures(runs[f"{part}: {name}"])
    assert list(messages) == [f"check-{part}"], "one wrong answer spoils its own part and no other"
    assert says in messages[f"check-{part}"]


def test_an_answer_that_raises_is_told_what_that_usually_means_and_the_hint(runs: Results) -> None:
    empty = failures(runs["d: longest of no gaps"])["check-d"]
    assert "deal with the empty case first" in empty and "TTFT = t_1 - t_a" in empty
    assert "dataclasses.replace makes a changed copy" in failures(runs["f: frozen config assigned to"])["check-f"]


def test_numbers_in_a_message_are_rounded(runs: Results) -> None:
    message = failures(runs["d: 256 gaps"])["check-d"]
    assert "'longest_gap': 0.1225," in message and "0.12249" not in message


def test_the_set_up_holds_no_answers() -> None:
    setup = next(cell.source for cell in Exercise.load(SOLUTION).cells("setup"))
    answers = ("blocks_needed", "longest_gap", "pool_blocks", "request_timeline", "tokens_computed", "total_seconds")
    assert [name for name in answers if name in setup] == []


def test_no_check_spells_out_an_answer() -> None:
    checks = "".join(cell.source for cell in Exercise.load(SOLUTION).cells("check"))
    assert "num_scheduled_tokens" not in checks and "+ output - 1" not in checks


def test_answers_made_for_the_visible_inputs_fail_on_others(runs: Results) -> None:
    outcomes = {name: item.outcome for name, item in runs["narrow"].items() if item.outcome != "passed"}
    assert outcomes == {"check-a": "hidden", "check-b": "hidden", "check-f": "hidden"}


def test_released_copy_is_in_step() -> None:
    assert out_of_step(ROOT / "solutions", ROOT / "exercises", [NAME]) == []


def test_nothing_of_it_needs_torch() -> None:
    """Grading hundreds of submissions pays for what each imports."""
    cells = nbformat.read(SOLUTION, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    program = f"{code}\nimport sys\nassert 'simulate' in globals() and 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
