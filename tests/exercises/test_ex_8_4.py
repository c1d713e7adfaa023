"""Exercise 8-4: unsolved it says so, solved it passes, and the usual mistakes are recognised."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from coursekit.authoring import UNSOLVED, failures, try_answers
from coursekit.exercise import Exercise
from coursekit.release import release_notebook, strip_answer
from coursekit.score import ItemResult

SOLUTION = Path(__file__).parents[2] / "solutions" / "ex_8_4_prefix_value.ipynb"
CHECKS = {f"check-{part}" for part in "abcdefg"}
SOURCES = {cell.metadata["nbgrader"]["grade_id"]: cell.source for cell in Exercise.load(SOLUTION).cells("answer")}


def changed(part: str, old: str, new: str) -> str:
    """The reference answer of a part with one piece replaced: how a mistake looks in an otherwise right answer."""
    source = SOURCES[f"answer-{part}"]
    assert old in source, f"the solution of part {part} no longer holds {old!r}"
    return source.replace(old, new)


# name of the mistake: (part, the answer, words of the message that fits)
WRONG = {
    "token by token": ("a", changed("a", "usable // size * size", "usable"), "to match token by token"),
    "rounded up": ("a", changed("a", "usable // size * size", "-(-usable // size) * size"), "rounded up"),
    "last token found": ("a", changed("a", "min(common_tokens(first, second), len(second) - 1)",
                                      "common_tokens(first, second)"), "is not left to compute"),
    "blocks": ("a", changed("a", "usable // size * size", "usable // size"), "blocks are counted, not tokens"),
    "all equal tokens": ("a", changed("a", "            break\n", "            continue\n"), "after the first"),
    "one too many": ("a", changed("a", "    return count", "    return count + 1"), "counted as equal"),
    "one less in any case": ("a", changed("a", "min(common_tokens(first, second), len(second) - 1)",
                                          "max(common_tokens(first, second) - 1, 0)"), "held back in any case"),
    "one less below nothing": ("a", changed("a", "min(common_tokens(first, second), len(second) - 1)",
                                            "common_tokens(first, second) - 1"), "held back in any case"),
    "last token of the first": ("a", changed("a", "len(second) - 1", "len(first) - 1"), "is not left to compute"),
    "a block less if equal": ("a", changed("a", "usable // size * size",
                                           "(common_tokens(first, second) // size - (first == second)) * size"),
                              "is not left to compute"),
    "always 16": ("a", changed("a", "usable // size * size", "usable // 16 * 16"), "size is not used"),
    "no chain": ("b", changed("b", "hash((name, tuple", "hash((hash(key), tuple"), "the block's own tokens only"),
    "no key": ("b", changed("b", "hash(key)", "0"), "the key is not in the names"),
    "key at the start only": (
        "b", changed("b", "name = hash((name, tuple(tokens[start : start + size])))",
                     "name = hash((name if start == 0 else 0, tuple(tokens[: start + size])))"),
        "in the first block's name only",
    ),
    "whole prompt": ("b", changed("b", "hash((name, tuple(tokens[start : start + size])))",
                                  "hash((name, start, tuple(tokens)))"), "on what comes after"),
    "rest named": ("b", changed("b", "len(tokens) // size * size", "len(tokens)"), "the rest that fills no block"),
    "past a miss": ("b", changed("b", "            break\n", "            continue\n"), "found after a missing one"),
    "all that are there": ("b", SOURCES["answer-b"].partition("def look_up")[0] + "def look_up(cached, tokens, size, "
                           "key):\n    return size * len(cached & set(block_names(tokens[:-1], size, key)))\n",
                           "found after a missing one"),
    "last full block lost": ("b", changed("b", "len(tokens) // size * size", "len(tokens) - size"),
                             "the last full block is lost"),
    "always 16 b": ("b", changed("b", "len(tokens) // size * size, size", "len(tokens) // 16 * 16, 16").replace(
        "start + size", "start + 16"), "size is not used"),
    "found in 16": ("b", changed("b", "found += size", "found += 16"), "size is not used"),
    "set of tokens": ("b", changed("b", "tuple(tokens[start : start + size])",
                                   "frozenset(tokens[start : start + size])"), "the order of the tokens"),
    "sum of tokens": ("b", changed("b", "hash((name, tuple(tokens[start : start + size])))",
                                   "hash((key, sum(tokens[: start + size])))"), "the order of the tokens"),
    "one block back": ("b", changed("b", "hash((name, tuple(tokens[start : start + size])))",
                                    "hash((key, tuple(tokens[max(0, start - size) : start + size])))"),
                       "reaches back one block only"),
    "47 of 48": ("b", changed("b", "tokens[:-1]", "tokens").replace("return found",
                                                                              "return min(found, len(tokens) - 1)"),
                 "blocks are found whole"),
    "all of the prompt": ("b", changed("b", "tokens[:-1]", "tokens"), "the last token is not left"),
    "blocks looked up": ("b", changed("b", "found += size", "found += 1"), "blocks are counted, not tokens"),
    "MB": ("c", changed("c", "tokens * KV_BYTES", "tokens * KV_BYTES / MiB * 1e6"), "MiB are read as MB"),
    "GiB": ("c", changed("c", "(gb_per_s * 1e9)", "(gb_per_s * 2**30)"), "read as GiB"),
    "seconds": ("c", changed("c", "/ (gb_per_s * 1e9) * 1e3", "/ (gb_per_s * 1e9)"), "seconds are returned"),
    "there and back": ("c", changed("c", "return tokens * KV_BYTES", "return 2 * tokens * KV_BYTES"), "there and back"),
    "62 %": ("c", changed("c", "(MFU * PEAK)", "(0.62 * PEAK)"), "the book computes with 0.622"),
    "full square": ("c", changed("c", "tokens * (tokens + 1) // 2", "tokens * tokens"), "the full square"),
    "no attention": ("c", changed("c", " + pairs * FLOPS_PER_PAIR", ""), "is left out"),
    "head": ("c", changed("c", "(tokens * FLOPS_PER_TOKEN", "(book.lm_head_flops(QWEN3_8B) + tokens * FLOPS_PER_TOKEN"),
             "LM head of one row"),
    "half a diagonal": ("c", changed("c", "tokens * (tokens + 1) // 2", "tokens * tokens / 2"), "half of the diagonal"),
    "GB as bytes": ("c", changed("c", "(gb_per_s * 1e9)", "gb_per_s"), "taken for bytes"),
    "Gbit": ("c", changed("c", "(gb_per_s * 1e9)", "(gb_per_s * 1e9 / 8)"), "gigabits"),
    "times MFU": ("c", changed("c", "(MFU * PEAK)", "PEAK * MFU"), "MFU multiplies the time"),
    "layers again": ("c", changed("c", "pairs * FLOPS_PER_PAIR", "36 * pairs * FLOPS_PER_PAIR"), "by the layers again"),
    "KV of layers again": ("c", changed("c", "tokens * KV_BYTES", "36 * tokens * KV_BYTES"), "by the layers again"),
    "rounded": ("c", changed("c", "return tokens * KV_BYTES / (gb_per_s * 1e9) * 1e3",
                             "return round(tokens * KV_BYTES / (gb_per_s * 1e9) * 1e3, 2)"), "a rounded value"),
    "fetch forgotten": ("d", changed("d", "(recompute_ms(tokens) - fetch) - fetch", "recompute_ms(tokens) - fetch"),
                        "the fetch is left out"),
    "loss cut off": ("d", changed("d", "return chance * (recompute_ms(tokens) - fetch) - fetch",
                                  "return max(0, chance * (recompute_ms(tokens) - fetch) - fetch)"), "cut off at zero"),
    "upkeep twice": ("d", changed("d", "- fetch) - fetch", "- fetch) - 2 * fetch"), "not there and back"),
    "always 0.5": ("d", changed("d", "return chance *", "return 0.5 *"), ""),
    "0 for none": ("d", changed("d", "else None", "else 0"), "0 says that any chance is enough"),
    "fetch on top": ("d", changed("d", "return fetch / saved if fetch <= saved else None",
                                  "return 2 * fetch / recompute_ms(tokens)"), "so it belongs with T_r"),
    "upkeep on hits": ("d", changed("d", "(tokens) - fetch) - fetch", "(tokens) - 2 * fetch)"),
                       "upkeep is paid on hits only"),
    "no upkeep": ("d", changed("d", "- fetch) - fetch", "- fetch)"), "upkeep is left out"),
    "fetch always": ("d", changed("d", "(recompute_ms(tokens) - fetch) - fetch", "recompute_ms(tokens) - 2 * fetch"),
                     "paid on misses too"),
    "threshold of T_r": ("d", changed("d", "saved = recompute_ms(tokens) - fetch", "saved = recompute_ms(tokens)"),
                         "not taken off what a hit saves"),
    "above 1": ("d", changed("d", " if fetch <= saved else None", ""), "return None"),
    "cut to 1": ("d", changed("d", "fetch / saved if fetch <= saved else None", "min(1.0, fetch / abs(saved))"),
                 "not even 1"),
    "one of three": ("e", changed("e", "count * value_ms", "value_ms"), "one small prefix is compared"),
    "tie without upkeep": ("e", changed("e", "(several + fetch)", "several"), "upkeep of the large one"),
    "tie above 1": ("e", changed("e", "return chance if chance <= 1 else None", "return chance"), "above 1 is none"),
    "tie cut to 1": ("e", changed("e", "return chance if chance <= 1 else None", "return min(1, chance)"),
                     "not even 1"),
    "ratio of values": ("e", changed("e", "return chance if chance <= 1 else None",
                                     "return p_small * several / value_ms(large, p_small, gb_per_s)"),
                        "V_h is not proportional to p"),
    "typed in": ("e", changed("e", "one >= several", "p_large > 0.46"), "p_small is not used"),
    "defaults": ("e", changed("e", "count * value_ms(small,", "3 * value_ms(2048,"),
                 "large, small and count are not used"),
    "tie of defaults": ("e", changed("e", "return chance if", "if (small, count) != (2048, 3):\n        "
                                     "return tie_chance(p_small, gb_per_s)\n    return chance if"),
                        "small and count are not used"),
    "equal chances": ("e", changed("e", "return chance if chance <= 1 else None", "return p_small"),
                      "equal bytes are taken for equal value"),
    "turned round": ("e", changed("e", "one >= several", "one < several"), "turned round"),
    "greedy for best": ("f", changed("f", "    return sorted(name for name, _, _ in best)",
                                     "    return by_density(prefixes, budget_mib)"), "what value per MiB keeps"),
    "most prefixes": ("f", changed("f", "sum(value for _, _, value in some))", "len(some))"), "the most prefixes"),
    "over budget": ("f", changed("f", "<= budget_mib]", "<= 2 * budget_mib]"), ""),
    "never the whole": ("f", changed("f", "range(len(prefixes) + 1)", "range(len(prefixes))"), "never tried"),
    "neither whole nor none": ("f", changed("f", "range(len(prefixes) + 1)", "range(1, len(prefixes))").replace(
        "    best = max(fitting,", "    best = max(fitting or [()],"), "never tried"),
    "below the budget": ("f", changed("f", "<= budget_mib]", "< budget_mib]"), "fills the budget exactly"),
    "whole prefixes": ("f", changed("f", "    return sorted(name for name, _, _ in best)", "    return sorted(best)"),
                       "the names are asked for"),
    "keeps nothing's worth": ("f", changed("f", "value > 0", "value >= 0"), "saves nothing"),
    "lowest density": ("f", changed("f", "-prefix[2] / prefix[1]", "prefix[2] / prefix[1]"),
                       "the lowest value per MiB"),
    "unsorted": ("f", changed("f", "    return sorted(names)", "    return names"), "not sorted"),
    "by value": ("f", changed("f", "-prefix[2] / prefix[1]", "-prefix[2]"), "the largest value comes first"),
    "stops": ("f", changed("f", "budget_mib -= mib\n", "budget_mib -= mib\n        else:\n            break\n"),
              "stops at the first"),
    "spends nothing": ("f", changed("f", "            budget_mib -= mib\n", ""), "not lowered"),
    "keeps losses": ("f", changed("f", "value > 0 and ", ""), "saves nothing"),
    "no counterexample": ("f", changed("f", '[("A", 864, 132.7), ("C", 288, 49.3)], 864', '[("A", 864, 132.7)], 864'),
                          "finds the best set of your example"),
    "last of the list": ("g", changed("g", "max((position for position in snapshots if position <= matched), "
                                      "default=0)",
                                      "([0] + [position for position in snapshots if position <= matched])[-1]"),
                         "snapshots come in any order"),
    "shares in 16": ("g", changed("g", "tokens // size * size", "tokens // 16 * 16"), "size is not used"),
    "rounded shares": ("g", changed("g", "return sum(common) / sum(prompts), sum(found) / sum(prompts)",
                                    "return round(sum(common) / sum(prompts), 3), round(sum(found) / sum(prompts), 3)"),
                       "a rounded value"),
    "text end": ("g", changed("g", "max((position for position in snapshots if position <= matched), default=0)",
                              "matched"), "there is no state"),
    "snapshot behind": ("g", changed("g", " if position <= matched", ""), "belongs to another text"),
    "nearest": ("g", changed("g", "    return point, matched - point",
                             "    point = min(snapshots, key=lambda s: abs(s - matched))\n"
                             "    return point, abs(matched - point)"), "the nearest snapshot"),
    "strictly before": ("g", changed("g", "position <= matched", "position < matched"), "exactly at the end"),
    "with the replaced": ("g", changed("g", "length - replaced for", "length for"), "replaced tokens are counted"),
    "no blocks": ("g", changed("g", "tokens // size * size", "tokens"), "token by token"),
    "rounds but the first": ("g", changed("g", "sum(prompts)", "sum(prompts[1:])"), "all rounds but the first"),
    "one round more": ("g", changed("g", "prompts[:-1]", "prompts"), "the last round counts"),
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
    assert message.count("This looks like") == (says != ""), "one diagnosis, the likeliest; none where none is known"


@pytest.mark.parametrize("name, part, later", [("MB", "c", "de"), ("62 %", "c", "de"), ("no upkeep", "d", "e")])
def test_a_part_built_on_a_wrong_one_says_which_to_mend_first(
    name: str, part: str, later: str, runs: dict[str, dict[str, ItemResult]]
) -> None:
    messages = failures(runs[name])
    assert set(messages) == {f"check-{each}" for each in part + later}
    for each in later:
        assert messages[f"check-{each}"].startswith(f"Part {part} does not pass yet: mend it first.")
        assert "looks like" not in messages[f"check-{each}"]


def test_checks_alone_never_decide() -> None:
    """Values of the visible checks, typed in: the checks are content, the hidden probes are not."""
    typed = {
        "c": "def fetch_ms(tokens, gb_per_s):\n    return {(6144, 64): 14.155776, (2048, 64): 4.718592}.get("
             "(tokens, gb_per_s), 28.311552)\n\n\n" + SOURCES["answer-c"].partition("\n\n\n")[2],
        "f": changed("f", "    best = max(fitting", '    if prefixes and prefixes[0][0] == "p":\n        return []\n'
                     "    best = max(fitting"),
        "g": SOURCES["answer-g"].partition("\n\n\n")[0] + "\n\n\ndef shares(prompts, replaced, size=16):\n"
             "    return 16376 / 19556, 16304 / 19556\n",
    }  # fmt: skip
    runs = try_answers(SOLUTION, {part: {f"answer-{part}": source} for part, source in typed.items()})
    for part in typed:
        assert f"check-{part}" in failures(runs[part])


HELPERS = {  # a right answer with a helper whose name a check or the set-up may use, too: part → (the name, its answer)
    "a": ("common", changed("a", "zip(first, second, strict=False)", "common(first, second)")
          + "\n\ndef common(first, second):\n    return zip(first, second)\n"),
    "b": ("text", changed("b", "tuple(tokens[start : start + size])", "text(tokens[start : start + size])")
          + "\n\ndef text(tokens):\n    return tuple(tokens)\n"),
    "d": ("kept", changed("d", "fetch = fetch_ms(tokens, gb_per_s)", "fetch = kept(tokens, gb_per_s)")
          + "\n\ndef kept(tokens, link):\n    return fetch_ms(tokens, link)\n"),
    "f": ("chosen", changed("f", "    return sorted(name for name, _, _ in best)", "    return chosen(best)")
          + "\n\ndef chosen(best):\n    return sorted(name for name, _, _ in best)\n"),
    "g": ("total", changed("g", "sum(common) / sum(prompts)", "sum(common) / total(prompts)")
          + "\n\ndef total(prompts):\n    return sum(prompts)\n"),
}  # fmt: skip


def test_a_helper_may_have_any_name() -> None:
    """What a check cell computes with stays in it: a student's own `common` or `total` is not replaced."""
    runs = try_answers(SOLUTION, {"helpers": {f"answer-{part}": source for part, (_, source) in HELPERS.items()}})
    assert all(f"def {name}(" in source for name, source in HELPERS.values())
    assert failures(runs["helpers"]) == {}


TWO = "counterexample() must return two things, a list of (name, mib, value_ms) and a budget."
SHAPES = {  # what counterexample() returns → what is said of it
    '[("A", 864, 132.7), ("C", 288, 49.3)]': TWO,
    '864, [("A", 864, 132.7), ("C", 288, 49.3)]': TWO,
    '[("A", 864), ("C", 288)], 864': TWO,
    '[("A", "864", 132.7)], 864': TWO,
    '[(f"s{i}", 1, 2.0) for i in range(5)] + [("L", 100, 100.0)], 100':
        "counterexample() has 6 prefixes; at most 5 are allowed.",
    '[("A", 864, 132.7), ("C", 0, 49.3)], 864': "counterexample(): each prefix needs a size above 0 MiB.",
    '[("A", 864, 132.7), ("C", 288, 49.3)], -1': "counterexample(): the budget cannot be below 0 MiB.",
}  # fmt: skip


def test_a_counterexample_of_another_shape_is_told_which_is_wanted() -> None:
    own = '[("A", 864, 132.7), ("C", 288, 49.3)], 864'
    runs = try_answers(SOLUTION, {made: {"answer-f": changed("f", own, made)} for made in SHAPES})
    assert {made: failures(runs[made]) for made in SHAPES} == {made: {"check-f": SHAPES[made]} for made in SHAPES}


def test_what_builds_on_an_unsolved_part_names_it() -> None:
    stubs = {"answer-c": strip_answer(SOURCES["answer-c"], "c")}
    messages = failures(try_answers(SOLUTION, {"c": stubs})["c"])
    assert set(messages) == {"check-c", "check-d", "check-e"}
    for part in "de":
        assert messages[f"check-{part}"] == (
            "Not solved yet: this part uses part c, which is not solved yet. Solve part c first."
        )


def test_any_counterexample_will_do() -> None:
    own = changed("f", '[("A", 864, 132.7), ("C", 288, 49.3)], 864', '[("x", 2, 3.0), ("y", 3, 4.4), ("z", 3, 4.3)], 6')
    assert failures(try_answers(SOLUTION, {"own": {"answer-f": own}})["own"]) == {}


def test_the_stubs_have_no_stray_blank_line() -> None:
    answers = [
        cell.source for cell in release_notebook(Exercise.load(SOLUTION)).cells if cell["id"].startswith("answer")
    ]
    assert [source for source in answers if re.search(r"\n\n *raise", source)] == []


def test_the_exercise_stays_light() -> None:
    """A class of 200 is graded in minutes only if no submission imports torch."""
    setup = next(cell.source for cell in Exercise.load(SOLUTION).cells("setup"))
    command = [sys.executable, "-c", f"{setup}\nimport sys; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command, cwd=SOLUTION.parents[1], check=False).returncode == 0
