"""Exercise 8-1: fails unsolved, passes solved, and names the usual mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from coursekit.authoring import UNSOLVED, failures, try_answers
from coursekit.exercise import Exercise
from coursekit.release import release_notebook
from coursekit.score import ItemResult

SOLUTION = Path(__file__).parents[2] / "solutions" / "ex_8_1_reads_and_capacity.ipynb"

READ = "def read_gib_per_token(weight_bytes, kv_bytes_per_token, batch, context):\n    return "
CROSSOVER = "def crossover(weight_bytes, kv_bytes_per_token, context):\n    return "
FIT = "def requests_that_fit(pool_bytes, kv_bytes_per_token, prompt, output, block_size=16):\n"
FIT_END = "    return pool_bytes // (block_size * kv_bytes_per_token) // blocks"
LIMITS = "def limits(weight_bytes, kv_bytes_per_token, prompt, output, pool_bytes, block_size=16):\n    return "
FITS_AND_MEETS = (
    "(requests_that_fit(pool_bytes, kv_bytes_per_token, prompt, output), (n := crossover(D_w, k, prompt)), "
)
BOUND = "def compute_bound_from(flops, peak, weight_bytes, kv_bytes, bandwidth):\n    return "
QUOTIENT = "weight_bytes / bandwidth / (flops / peak - kv_bytes / bandwidth)"
GAIN = "{} if flops / peak > kv_bytes / bandwidth else None"
DIFFERENCES = "(bytes_large - bytes_small) / (seconds_large - seconds_small)"
MARGINAL = "def marginal_tb_per_s(bytes_small, seconds_small, bytes_large, seconds_large):\n    return "

# name of the mistake: (part, the answer, words of the hint that fits)
WRONG = {
    "GB for GiB": ("a", READ + "(weight_bytes / batch + context * kv_bytes_per_token) / 1e9", "GB (10**9)"),
    "context shared": (
        "a", READ + "(weight_bytes + context * kv_bytes_per_token) / batch / GiB", "divided among the batch as well",
    ),
    "weights for each": (
        "a", READ + "(weight_bytes + context * kv_bytes_per_token) / GiB", "charged with all the weights",
    ),
    "whole round": (
        "a", READ + "(weight_bytes + batch * context * kv_bytes_per_token) / GiB", "whole round is counted",
    ),
    "MiB": (
        "a", READ + "(weight_bytes / batch + context * kv_bytes_per_token) / 2**20", "MiB (2**20) are returned",
    ),
    "rounded down": ("b", CROSSOVER + "weight_bytes // (context * kv_bytes_per_token)", "rounded down"),
    "rounded to the nearest": (
        "b", CROSSOVER + "round(weight_bytes / (context * kv_bytes_per_token))", "rounded to the nearest",
    ),
    "not rounded": ("b", CROSSOVER + "weight_bytes / (context * kv_bytes_per_token)", "not rounded at all"),
    "one added": ("b", CROSSOVER + "weight_bytes // (context * kv_bytes_per_token) + 1", "one is added"),
    "resident weights": (
        "b", CROSSOVER + "-(-(weight_bytes + 1_244_659_712) // (context * kv_bytes_per_token))", "input embedding too",
    ),
    "prefill only": ("c", FIT + "    blocks = -(-prompt // block_size)\n" + FIT_END, "only the prompt is counted"),
    "last token": (
        "c", FIT + "    blocks = -(-(prompt + output) // block_size)\n" + FIT_END, "last output token is counted",
    ),
    "blocks rounded down": ("c", FIT + "    blocks = (prompt + output - 1) // block_size\n" + FIT_END,
                            "the blocks of a request are rounded down"),
    "requests rounded up": ("c", FIT + "    blocks = -(-(prompt + output - 1) // block_size)\n" + FIT_END.replace(
        "return pool_bytes", "return -(-pool_bytes").replace("// blocks", "// blocks)"), "requests are rounded up"),
    "requests not rounded": ("c", FIT + "    blocks = -(-(prompt + output - 1) // block_size)\n" + FIT_END.replace(
        "// blocks", "/ blocks"), "the number of requests is not rounded"),
    "swapped": ("d", LIMITS + "(n := crossover(D_w, k, prompt), requests_that_fit(pool_bytes, k, prompt, output), "
                "n * -(-(prompt + output - 1) // 16) * 16 * k / GiB)", "the first two are in the wrong order"),
    "pool of those that fit": ("d", LIMITS + "(n := requests_that_fit(pool_bytes, k, prompt, output), "
                               "crossover(D_w, k, prompt), n * -(-(prompt + output - 1) // 16) * 16 * k / GiB)",
                               "the pool is that of the requests that fit"),
    "fitting for crossover": ("d", LIMITS + "(n := requests_that_fit(pool_bytes, k, prompt, output), n, "
                              "n * -(-(prompt + output - 1) // 16) * 16 * k / GiB)",
                              "the requests that fit are taken for the crossover"),
    "arguments of another": ("d", LIMITS + "requests_that_fit(pool_bytes, prompt, output)",
                             "The line calls a function with other arguments"),
    "sum": ("e", BOUND + "math.ceil(weight_bytes / bandwidth / (flops / peak + kv_bytes / bandwidth))",
            "it is the difference that counts"),
    "never": ("e", BOUND + "None", "no batch is found"),
    "part-filled block": (
        "c", FIT + "    return pool_bytes // ((prompt + output - 1) * kv_bytes_per_token)", "part-filled block",
    ),
    "pool in GB": (
        "d", LIMITS + FITS_AND_MEETS + "n * -(-(prompt + output - 1) // 16) * 16 * k / 1e9)", "counted in GB",
    ),
    "prompts only": ("d", LIMITS + FITS_AND_MEETS + "n * prompt * k / GiB)", "prompts only"),
    "tokens for blocks": ("d", LIMITS + FITS_AND_MEETS + "n * (prompt + output - 1) * k / GiB)", "not in whole blocks"),
    "weights alone": ("e", BOUND + "math.ceil(weight_bytes / bandwidth / (flops / peak))", "only the weights are read"),
    "negative batch": (
        "e", BOUND + "math.ceil(weight_bytes / bandwidth / (flops / peak - kv_bytes / bandwidth))", "be negative",
    ),
    "bytes for time": ("e", BOUND + "math.ceil(weight_bytes / kv_bytes)", "bytes with bytes"),
    "batch rounded down": ("e", BOUND + GAIN.format(f"math.floor({QUOTIENT})"), "rounded down, or to the nearest"),
    "batch rounded": ("e", BOUND + GAIN.format(f"round({QUOTIENT})"), "rounded down, or to the nearest"),
    "batch not rounded": ("e", BOUND + GAIN.format(QUOTIENT), "the quotient is not rounded"),
    "bytes a second": ("f", MARGINAL + DIFFERENCES, "bytes a second are returned"),
    "GB a second": ("f", MARGINAL + DIFFERENCES + " / 1e9", "GB (10**9) a second"),
    "sign": ("f", MARGINAL + "-" + DIFFERENCES + " / 1e12", "small less large"),
    "average": ("f", MARGINAL + "bytes_large / seconds_large / 1e12", "an average"),
    "TiB": ("f", MARGINAL + "(bytes_large - bytes_small) / (seconds_large - seconds_small) / 2**40", "TiB (2**40)"),
    "typed in": ("b", CROSSOVER + "{2048: 51, 8192: 13}.get(context, 8)", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, ItemResult]]:
    wrong = {name: {f"answer-{part}": source} for name, (part, source, _) in WRONG.items()}
    return try_answers(SOLUTION, {"unsolved": UNSOLVED, "solved": {}, **wrong})


def test_solved(runs: dict[str, dict[str, ItemResult]]) -> None:
    assert failures(runs["solved"]) == {}
    assert len(runs["solved"]) == 6


def test_unsolved_fails_kindly(runs: dict[str, dict[str, ItemResult]]) -> None:
    messages = failures(runs["unsolved"])
    assert set(messages) == set(runs["unsolved"])
    assert all("Not solved yet" in message and "Traceback" not in message for message in messages.values())


@pytest.mark.parametrize("name", [name for name, (_, _, hint) in WRONG.items() if hint])
def test_the_check_names_the_mistake(runs: dict[str, dict[str, ItemResult]], name: str) -> None:
    part, _, hint = WRONG[name]
    messages = failures(runs[name])
    assert hint in messages[f"check-{part}"]
    assert messages[f"check-{part}"].count("This looks like") == (" raised " not in messages[f"check-{part}"])


@pytest.mark.parametrize("name, part", [("rounded down", "b"), ("prefill only", "c")])
def test_a_part_built_on_a_wrong_one_says_which_to_mend_first(
    runs: dict[str, dict[str, ItemResult]], name: str, part: str
) -> None:
    messages = failures(runs[name])
    assert messages["check-d"].startswith(f"Part {part} does not pass yet: mend it first.")
    assert set(messages) == {f"check-{part}", "check-d"} and "looks like" not in messages["check-d"]


def test_a_wrong_part_is_judged_by_itself_where_the_earlier_ones_are_right(
    runs: dict[str, dict[str, ItemResult]],
) -> None:
    assert "mend it first" not in failures(runs["pool in GB"])["check-d"]


def test_the_guess_is_not_given_away() -> None:
    """Whoever reads part d from its question to its hint learns the answer only on opening the fold."""
    cells = release_notebook(Exercise.load(SOLUTION)).cells
    ids = [cell["id"] for cell in cells]
    read = "\n".join(cell.source for cell in cells[ids.index("part-d") : ids.index("part-e")])
    open_to_all = re.sub(r"<details>.*?</details>", "", read, flags=re.S)
    assert "Memory binds first" in read
    assert not re.search(r"Memory binds first|\b(37|51|10|13|16\.1|15\.1)\b", open_to_all.replace("10**9", ""))


def test_only_the_wrong_part_fails(runs: dict[str, dict[str, ItemResult]]) -> None:
    assert set(failures(runs["average"])) == {"check-f"}


def test_values_typed_in_pass_the_check_and_fail_the_hidden_probes(runs: dict[str, dict[str, ItemResult]]) -> None:
    assert "check-b" in failures(runs["typed in"])


def test_the_exercise_stays_light() -> None:
    """A class of 200 is graded in minutes only if no submission imports torch."""
    setup = next(cell.source for cell in Exercise.load(SOLUTION).cells("setup"))
    command = [sys.executable, "-c", f"{setup}\nimport sys; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command, cwd=SOLUTION.parents[1], check=False).returncode == 0
