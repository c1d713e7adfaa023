"""Exercise 8-2: unsolved it says so, solved it passes, and the usual mistakes are recognised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coursekit.authoring import UNSOLVED, failures, try_answers
from coursekit.exercise import Exercise
from coursekit.one_round import scheduled_round
from coursekit.release import release_notebook
from coursekit.score import ItemResult

SOLUTION = Path(__file__).resolve().parents[2] / "solutions" / "ex_8_2_chunk_from_gap.ipynb"
CHECKS = {"check-a", "check-b", "check-c", "check-d", "check-e"}

PAIRS = "def causal_pairs(chunk, history):\n    return {}\n\n\n"
GROWTH = """def work_growth(chunk, history):
    def work(before):
        return chunk * FLOPS_PER_TOKEN + causal_pairs(chunk, before) * FLOPS_PER_PAIR
    return work(history) / work(0)
"""
RIGHT_PAIRS = PAIRS.format("chunk * history + chunk * (chunk + 1) // 2")
ROUND = """def round_ms(work):
    tokens = sum(new for new, _ in work)
    pairs = sum(causal_pairs(new, history) for new, history in work)
    return {}


def book_rounds():
    return {}
"""
RIGHT_PRICE = "BASE_MS + TOKEN_US * tokens / 1e3 + PAIR_NS * pairs / 1e6"
RIGHT_ROUNDS = "[[(2048, 0), (2048, 0)], [(1, 2048), (1, 2048)], [(1, 2049), (8192, 0)]]"
FILL = """def fill_round(decoding, prompts, budget, threshold):
    chosen = {{}}
    for name, left in {order}:
        tokens = {tokens}
        if tokens:
            chosen[name] = tokens
            budget -= {taken}
    return chosen
"""
DECODES_FIRST = "[*((name, 1) for name in decoding), *prompts.items()]"
CHUNK = """def largest_chunk_for(gap_ms, history, decoding):
    chunk = 0
    while round_ms({}) {} gap_ms:
        chunk += 1
    return chunk{}
"""
READERS = """def for_readers(rows, gap_ms):
    kept = [row for row in rows if row["{}"] <= gap_ms]
    return min(kept, key=lambda row: row["{}"])["budget"] if kept else None


def for_newcomers(rows):
    return min(rows, key=lambda row: {})["budget"]
"""
RIGHT_KEY = '(row["queue"], row["longest"])'

# (answer cell, wrong answer, what the message says)
WRONG = {
    "not itself": ("a", PAIRS.format("chunk * history + chunk * (chunk - 1) // 2") + GROWTH, "attend to itself"),
    "no history": ("a", PAIRS.format("chunk * (chunk + 1) // 2") + GROWTH, "the history is left out"),
    "no triangle": ("a", PAIRS.format("chunk * history or chunk * (chunk + 1) // 2") + GROWTH, "inside the chunk"),
    "full square": ("a", PAIRS.format("chunk * (chunk + history)") + GROWTH, "the full square"),
    "31 times": ("a", RIGHT_PAIRS + "def work_growth(c, h):\n    return causal_pairs(c, h) / causal_pairs(c, 0)",
                 "only the pairs are compared"),
    "equal chunks": ("a", RIGHT_PAIRS + "def work_growth(c, h):\n    return 1.0", "taken to cost alike"),
    "measured": ("a", RIGHT_PAIRS + "def work_growth(c, h):\n    return 35.07 / 25.3", "the measured time"),
    "base each": ("b", ROUND.format(RIGHT_PRICE.replace("BASE_MS", "BASE_MS * len(work)"), RIGHT_ROUNDS),
                  "once a request, not once a round"),
    "µs a pair": ("b", ROUND.format(RIGHT_PRICE.replace("1e6", "1e3"), RIGHT_ROUNDS), "in µs, not ns"),
    "no pairs": ("b", ROUND.format("BASE_MS + TOKEN_US * tokens / 1e3", RIGHT_ROUNDS), "the pairs are left out"),
    "fresh pairs": ("b", ROUND.format(RIGHT_PRICE, RIGHT_ROUNDS).replace("(new, history) for", "(new, 0) for"),
                    "left out of the pairs"),
    "r0 forgotten": ("b", ROUND.format(RIGHT_PRICE, RIGHT_ROUNDS.replace("(1, 2049), ", "")),
                     "round 3 (r0 decodes beside r2's prefill): it has 1 entry. This looks like: a request of the "
                     "round is missing"),
    "last output cached": ("b", ROUND.format(RIGHT_PRICE, RIGHT_ROUNDS.replace("2049", "2050").replace("(1, 2048)",
                                                                                                      "(1, 2049)")),
                           "counts as cached already"),
    "one too low": ("b", ROUND.format(RIGHT_PRICE, RIGHT_ROUNDS.replace("2049", "2048")),
                    "is left out; it is in the cache"),
    "single round": ("b", ROUND.format(RIGHT_PRICE, "[(2048, 0), (2048, 0)]"), "A single round came"),
    "r2 in chunks": ("b", ROUND.format(RIGHT_PRICE, RIGHT_ROUNDS.replace("8192", "2048")),
                     "2048 tokens in it, which is too few"),
    "nothing fits": ("d", CHUNK.format("[*((1, c) for c in decoding), (chunk + 1, history)]", "<=",
                                       " or (0 if gap_ms > BASE_MS else -1)"), "here a negative number comes out"),
    "less than the gap": ("d", CHUNK.format("[*((1, c) for c in decoding), (chunk + 1, history)]", "<", ""),
                          "at most gap_ms includes it"),
    "row": ("e", READERS.format("longest", "queue", RIGHT_KEY).replace('["queue"])["budget"] if', '["queue"]) if'),
            "the row itself is returned"),
    "row for newcomers": ("e", READERS.format("longest", "queue", RIGHT_KEY).replace(')["budget"]\n', ')\n').replace(
        ')["budget"]', ')["budget"]'), "the row itself is returned"),
    "none found": ("e", READERS.format("longest", "queue", RIGHT_KEY).replace(" if kept", " if not rows"),
                   "no row is found, although one keeps the promise"),
    "no threshold": ("c", FILL.format(order=DECODES_FIRST, tokens="min(left, budget)", taken="tokens"),
                     "the threshold is not applied"),
    "prompts first": ("c", FILL.format(order="[*prompts.items(), *((name, 1) for name in decoding)]",
                                       tokens="min(left, threshold, budget)", taken="tokens"), "before decodes"),
    "decodes free": ("c", FILL.format(order=DECODES_FIRST, tokens="min(left, threshold, budget)",
                                      taken="tokens if name in prompts else 0"), "not taken off the budget"),
    "whole budget each": ("c", FILL.format(order=DECODES_FIRST, tokens="min(left, threshold, budget)", taken="0"),
                          "sees the whole budget"),
    "whole prompts": ("c", FILL.format(order=DECODES_FIRST, tokens="min(left, threshold) if left <= budget"
                                       " or left > 999 else 0", taken="tokens"), "overtakes"),
    "prompts deleted": ("c", "def fill_round(decoding, prompts, budget, threshold):\n    for name in prompts:\n"
                        "        del prompts[name]\n", "raised RuntimeError in fill_round, at `for name in prompts:`"),
    "no decodes": ("d", CHUNK.format("[(chunk + 1, history)]", "<=", ""), "who decode in the same round"),
    "no context": ("d", CHUNK.format("[*((1, c) for c in decoding), (chunk + 1, 0)]", "<=", ""), "cached tokens"),
    "rounded up": ("d", CHUNK.format("[*((1, c) for c in decoding), (chunk + 1, history)]", "<=", " + 1"),
                   "rounded up"),
    "without pairs": ("d", "def largest_chunk_for(gap_ms, history, decoding):\n    return int((gap_ms - BASE_MS) * 1e3 "
                      "/ TOKEN_US) - len(decoding)", "the pairs are left out"),
    "no base": ("d", CHUNK.format("[*((1, c) for c in decoding), (chunk + 1, history)]", "- BASE_MS <=", ""),
                "fixed part of the round"),
    "p95": ("e", READERS.format("p95", "queue", RIGHT_KEY), "lies beyond both"),
    "shortest gap": ("e", READERS.format("longest", "longest", RIGHT_KEY), "shortest gap decides"),
    "closest": ("e", READERS.format("longest", "queue", RIGHT_KEY).replace("else None", 'else rows[0]["budget"]'),
                "although it breaks the promise"),
    "shorter than": ("e", READERS.format("longest", "queue", RIGHT_KEY).replace("<=", "<"), "exactly gap_ms is taken"),
    "shortest of none": ("e", READERS.format("longest", "queue", RIGHT_KEY).replace(" if kept else None", ""),
                         "for_readers(record, 25) raised ValueError in for_readers, at `return min(kept,"),
    "gaps for newcomers": ("e", READERS.format("longest", "queue", 'row["longest"]'), "the gaps decide"),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, ItemResult]]:
    wrong = {name: {f"answer-{part}": source} for name, (part, source, _) in WRONG.items()}
    return try_answers(SOLUTION, {"unsolved": UNSOLVED, "solved": {}, **wrong})


def test_unsolved(runs: dict[str, dict[str, ItemResult]]) -> None:
    messages = failures(runs["unsolved"])
    assert set(messages) == CHECKS
    assert all("Not solved yet" in message for message in messages.values())


def test_solved(runs: dict[str, dict[str, ItemResult]]) -> None:
    assert failures(runs["solved"]) == {}


@pytest.mark.parametrize("name", WRONG)
def test_a_usual_mistake_is_recognised(name: str, runs: dict[str, dict[str, ItemResult]]) -> None:
    part, _, says = WRONG[name]
    message = failures(runs[name])[f"check-{part}"]
    assert says in message
    known = "raised" not in message and name not in ("single round", "r2 in chunks")
    assert message.count("This looks like") == known, "one diagnosis, the likeliest"


def test_a_wrong_try_does_not_buy_the_answer(runs: dict[str, dict[str, ItemResult]]) -> None:
    for name in ("r0 forgotten", "last output cached", "one too low", "single round", "r2 in chunks"):
        assert not re.search(r"8192|\(1, 20|\[\(", failures(runs[name])["check-b"])
    for name in ("no decodes", "no context", "rounded up", "without pairs", "no base"):
        message = failures(runs[name])["check-d"]
        assert "should be" not in message and re.search("which is too (high|low)", message)
        came = int(re.findall(r"came out as (-?\d+)", message)[0])
        assert not re.search(rf"\b({came - 1}|{came + 1})\b", message)


def test_an_answer_that_raises_is_told_what_that_usually_means_and_the_hint(
    runs: dict[str, dict[str, ItemResult]],
) -> None:
    message = failures(runs["shortest of none"])["check-e"]
    assert "deal with the empty case first" in message and "None of the rows promises it" in message
    message = failures(runs["prompts deleted"])["check-c"]
    assert "Go over a copy" in message and "lower the budget" in message


@pytest.mark.parametrize("name, part, later", [("not itself", "a", "b"), ("no history", "a", "bd"),
                                               ("base each", "b", "d"), ("no pairs", "b", "d")])  # fmt: skip
def test_a_part_built_on_a_wrong_one_says_which_to_mend_first(
    name: str, part: str, later: str, runs: dict[str, dict[str, ItemResult]]
) -> None:
    messages = failures(runs[name])
    assert set(messages) == {f"check-{each}" for each in part + later}
    for each in later:
        assert messages[f"check-{each}"].startswith(f"Part {part} does not pass yet: mend it first.")
        assert "looks like" not in messages[f"check-{each}"]


def test_the_stubs_have_no_stray_blank_line() -> None:
    answers = [
        cell.source for cell in release_notebook(Exercise.load(SOLUTION)).cells if cell["id"].startswith("answer")
    ]
    assert [source for source in answers if re.search(r"\n\n *raise", source)] == []


def test_checks_alone_never_decide(runs: dict[str, dict[str, ItemResult]]) -> None:
    """Values of the visible checks, typed in: the checks are content, the hidden probes are not."""
    typed = {
        "answer-a": PAIRS.format("{(4, 0): 10, (4, 8): 42, (512, 0): 131328}.get((chunk, history), 4063488)") + GROWTH
    }
    assert "check-a" in failures(try_answers(SOLUTION, {"typed": typed})["typed"])


@pytest.mark.parametrize(
    "decoding, prompts, budget, threshold, want",
    [
        (["a"], {"b": 5000}, 4096, 2048, {"a": 1, "b": 2048}),
        (["a", "b"], {"c": 90, "d": 90}, 128, 100, {"a": 1, "b": 1, "c": 90, "d": 36}),
        (["a", "b", "c"], {"d": 90}, 3, 100, {"a": 1, "b": 1, "c": 1}),
        ([], {"d": 90}, 64, 32, {"d": 32}),
    ],
)
def test_rounds_by_hand(
    decoding: list[str], prompts: dict[str, int], budget: int, threshold: int, want: dict[str, int]
) -> None:
    """What the checks compare with, the engine's scheduler, against rounds worked out by hand."""
    assert scheduled_round(decoding, prompts, budget, threshold) == want
