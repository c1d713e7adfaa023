"""Exercise 10-1: unsolved it says so, solved it passes, and the usual mistakes are named."""

from __future__ import annotations

import math
import random
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from coursekit.authoring import UNSOLVED, failures, try_answers
from coursekit.checks import CheckFailed
from coursekit.exercise import Exercise
from coursekit.merge_checks import check_merge, merged
from coursekit.score import ItemResult
from mini_engine.analysis import get_hardware
from mini_engine.analysis.dcp_layouts import FABRICS, break_even_context
from mini_engine.analysis.dcp_shapes import get_attention
from mini_engine.dcp import merge_parts

SOLUTION = Path(__file__).parents[2] / "solutions" / "ex_10_1_cut_the_context.ipynb"
CHECKS = {f"check-{part}" for part in "abcdef"}
SOURCES = {cell.metadata["nbgrader"]["grade_id"]: cell.source for cell in Exercise.load(SOLUTION).cells("answer")}


def changed(part: str, old: str, new: str) -> str:
    """The reference answer of a part with one piece replaced: how a mistake looks in an otherwise right answer."""
    source = SOURCES[f"answer-{part}"]
    assert old in source, f"the solution of part {part} no longer holds {old!r}"
    return source.replace(old, new)


CHECKED = {  # what check f asks for: {batch: break-even context}
    batch: break_even_context(get_attention(name), get_hardware("b200"), FABRICS[link], 8, size, batch)
    for name, size, link, batch in (
        ("kimi-k2", 8, "nvlink", 1), ("kimi-k2", 8, "pcie5", 16), ("qwen3-235b-a22b", 2, "nvlink", 64),
    )
}  # fmt: skip
HELD = "held = [(values, lse) for values, lse in parts if lse > -math.inf]"
# name of the mistake: (part, the answer, words of the message that fits)
WRONG = {
    "owner one too far": ("a", changed("a", "position // interleave % n", "(position // interleave + 1) % n"),
                          "off by one: the first turn goes to rank 0"),
    "turn one too short": ("a", changed("a", "position // interleave % n", "(position + 1) // interleave % n"),
                           "off by one"),
    "no interleave": ("a", changed("a", "position // interleave % n", "position % n"), "the interleave is left out"),
    "turn too long": ("a", changed("a", "position // interleave % n", "position // (n * interleave) % n"),
                      "a turn is taken to have n * interleave tokens"),
    "no table": ("a", changed("a", "table[block]", "block"), "not looked up in the table"),
    "pool of all": ("a", changed("a", "table[block] * size", "table[block] * n * size"), "this rank's tokens only"),
    "entries of size": ("a", changed("a", "divmod(position, n * size)", "divmod(position, size)"),
                        "an entry of the table stands for n × size positions"),
    "one slot a turn": ("a", changed("a", "turn // n * interleave + within", "turn // n"),
                        "all of them got the same slot"),
    "no rank": ("a", changed("a", "position // interleave % n", "position // interleave"), "never starts again"),
    "slot not localised": ("a", changed("a", "turn // n * interleave + within", "offset"),
                           "the offset is that in the virtual block of all ranks"),
    "slot of the whole": ("a", changed("a", "block, offset = divmod(position, n * size)\n    turn, within",
                                       "return table[position // size] * size + position % size\n    turn, within")
                          .replace("divmod(offset, interleave)", "divmod(position, interleave)"),
                          "would have without context parallelism"),
    "others written": ("a", changed("a", "if owner(position, n, interleave) != rank:", "if False:"),
                       "tokens of other ranks are written too"),
    "evenly": ("b", changed("b", "rounds * interleave + min(max(rest - rank * interleave, 0), interleave)",
                            "length // n"), "shared out evenly and rounded down"),
    "evenly up": ("b", changed("b", "rounds * interleave + min(max(rest - rank * interleave, 0), interleave)",
                               "-(-length // n)"), "rounded up on every rank"),
    "below nothing": ("b", changed("b", "max(rest - rank * interleave, 0)", "rest - rank * interleave"),
                      "less than nothing"),
    "from 1": ("b", changed("b", "rest - rank * interleave", "rest - (rank + 1) * interleave"),
               "ranks are counted from 1"),
    "one token less": ("b", changed("b", "divmod(length,", "divmod(max(length - 1, 0),"),
                       "the last token is not counted"),
    "one token more": ("b", changed("b", "divmod(length,", "divmod(length + 1,"), "a token more is counted"),
    "whole turns": ("b", changed("b", "min(max(rest - rank * interleave, 0), interleave)",
                                 "interleave * (rest > rank * interleave)"), "a turn that has begun"),
    "blocks of one": ("b", changed("b", "-(-length // (n * size))", "-(-length // size)"),
                      "blocks as without context parallelism"),
    "base 2": ("c", changed("c", "math.exp(lse - top)", "2 ** (lse - top)"), "it is a natural logarithm"),
    "mean": ("c", changed("c", "math.exp(lse - top)", "1.0"), "the plain mean"),
    "empty is 0": ("c", changed("c", HELD, "held = [(v, l) if l > -math.inf else ([0.0] * width, 0.0) "
                                "for v, l in parts]"), "an empty part taken for lse 0"),
    "reads what is empty": ("c", changed("c", "lse > -math.inf]", "True]").replace(
        "if not held:", "if max(lse for _, lse in parts) == -math.inf:"), "0 times NaN is NaN"),
    "weighed by lse": ("c", changed("c", "math.exp(lse - top)", "lse"), "weighed by lse itself"),
    "not divided": ("c", changed("c", " / total for i", " for i"), "not divided by the sum of the weights"),
    "empty of lse 0": ("c", changed("c", "return [0.0] * width, -math.inf", "return [0.0] * width, 0.0"),
                       "an empty result has lse -inf"),
    "log2": ("c", changed("c", "math.log(total)", "math.log2(total)"), "lse is a natural one"),
    "only values": ("c", changed("c", "return values, top + math.log(total)", "return values"),
                    "merge must return two things: a list of values, and one lse."),
    "lse first": ("c", changed("c", "return values, top + math.log(total)", "return top + math.log(total), values"),
                  "merge must return two things: a list of values, and one lse."),
    "inf / inf": ("c", changed("c", "math.exp(lse - top)", "float(np.exp(lse - top))").replace(
        "top = max(lse for _, lse in held)", "top = 0"), "inf / inf is NaN"),
    "overflow": ("c", changed("c", "top = max(lse for _, lse in held)", "top = 0"), "subtract the largest lse first"),
    "overflows": ("c", changed("c", "top = max(lse for _, lse in held)", "top = 0"), "OverflowError"),
    "lse without offset": ("c", changed("c", "top + math.log(total)", "math.log(total)"), "without the offset"),
    "every divisor": ("d", changed("d", "if copies % n == 0", "if tp % n == 0"), "groups would mix KV heads"),
    "vLLM's check": ("d", changed("d", "if copies % n == 0", "if tp % n == 0 and n <= copies"),
                     "lets a group mix two KV heads"),
    "posts' rule": ("d", changed("d", "tp // kv_heads if tp % kv_heads == 0 else 1", "max(1, tp // kv_heads)"),
                    "without asking that KV heads divide tp"),
    "heads not asked": ("d", changed("d", "if heads % tp:\n        return []", "pass"), "before anything else"),
    "divided twice": ("d", changed("d", "max(1, kv_heads / tp)", "kv_heads / tp"),
                      "divided by tp as well, where heads are copied and not cut"),
    "all KV heads": ("d", changed("d", "max(1, kv_heads / tp)", "kv_heads"), "all KV heads are counted on each rank"),
    "query heads": ("d", changed("d", "max(1, kv_heads / tp)", "max(1, heads / tp)"), "query heads are counted"),
    "whole bytes": ("d", changed("d", "* 2 / n", "* 2 // n"), "rounded down; it is an average"),
    "refuses some": ("d", changed("d", "if n not in allowed_sizes(tp, heads, kv_heads):",
                                  "if kv_heads >= tp and n > 1:"),
                     "n=3) should raise ValueError"),
    "refuses no divisor": ("d", changed("d", "if n not in allowed_sizes(tp, heads, kv_heads):",
                                        "if tp % n or (kv_heads >= tp and n > 1):"), "n=4) should raise ValueError"),
    "not refused": ("d", changed("d", "raise ValueError(", "print("), "should raise ValueError"),
    "grows with context": ("e", changed("e", "return queries", "return context * (queries").replace(
        "element_bytes + lse", "element_bytes + lse)"), "bytes that grow with the context"),
    "own part too": ("e", changed("e", "rows = (n - 1) * batch * heads // n", "rows = batch * heads"),
                     "a rank's own part counted"),
    "other way": ("e", changed("e", 'way == "ag_rs"', 'way == "a2a"'), "the bytes of the other way"),
    "lse of one's own": ("e", changed("e", '(n if way == "ag_rs" else 1)', "1"), "the bytes of the other way"),
    "key_dim for results": ("e", changed("e", "rows * value_dim", "rows * key_dim"), "key_dim where value_dim belongs"),
    "all heads asked": ("e", changed("e", "rows * key_dim", "(n - 1) * batch * heads * key_dim"),
                        "every rank sends all heads as queries"),
    "own queries": ("e", changed("e", "rows * key_dim", "batch * heads * key_dim"), "the queries of one's own heads"),
    "own lse": ("e", changed("e", "lse = 4 * rows", "lse = 4 * n * rows // (n - 1)"), "one's own lse is counted"),
    "one other rank": ("e", changed("e", "rows * value_dim", "rows // (n - 1) * value_dim"),
                       "results of one other rank only"),
    "all ranks": ("e", changed("e", "return queries + rows * value_dim * element_bytes + lse",
                               "return n * (queries + rows * value_dim * element_bytes + lse)"),
                  "the sum over all ranks"),
    "elements": ("e", changed("e", "* element_bytes", ""), "elements, not bytes (the lse apart)"),
    "all elements": ("e", changed("e", "* element_bytes", "").replace("lse = 4 *", "lse ="), "elements, not bytes."),
    "KiB": ("e", changed("e", "return queries + rows * value_dim * element_bytes + lse",
                         "return (queries + rows * value_dim * element_bytes + lse) / 1024"), "KiB, not bytes"),
    "n - 1 parts": ("f", changed("f", "(1 - 1 / n)", "(n - 1)"), "n - 1 parts of a rank's reads"),
    "of all requests": ("f", changed("f", "return math.ceil(exchange_s * bandwidth / spared)",
                                     "return batch * math.ceil(exchange_s * bandwidth / spared)"),
                        "the tokens of all requests together"),
    "always one more": ("f", changed("f", "math.ceil(exchange_s * bandwidth / spared)",
                                     "int(exchange_s * bandwidth / spared) + 1"), "one more than needed"),
    "what remains": ("f", changed("f", "* (1 - 1 / n)", "/ n"), "what a rank still reads"),
    "all spared": ("f", changed("f", " * (1 - 1 / n)", ""), "a part is still read"),
    "one request": ("f", changed("f", "batch * tp_bytes", "tp_bytes"), "one request, not the batch"),
    "rounded down": ("f", changed("f", "math.ceil", "math.floor"), "rounded down"),
    "typed in": ("f", f"def break_even(tp_bytes, n, batch, exchange_s, bandwidth):\n"
                 f"    return 128 if tp_bytes == 2 else {CHECKED}[batch]\n", ""),
}  # fmt: skip


def in_rounds() -> dict[str, list[str]]:
    """The mistakes by the round they are tried in: the first of each part together, then the second of each, and so
    on. A run takes seconds, and no part uses another's answer."""
    parts = [[name for name, (of, _, _) in WRONG.items() if of == part] for part in "abcdef"]
    rounds = zip_longest(*parts)
    return {f"round {i}": [name for name in names if name] for i, names in enumerate(rounds)}


ROUNDS = in_rounds()
ROUND_OF = {name: key for key, names in ROUNDS.items() for name in names}


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, ItemResult]]:
    """Of every mistake the results of its round."""
    wrong = {key: {f"answer-{WRONG[name][0]}": WRONG[name][1] for name in names} for key, names in ROUNDS.items()}
    tried = try_answers(SOLUTION, {"unsolved": UNSOLVED, "solved": {}, **wrong})
    return tried | {name: tried[key] for name, key in ROUND_OF.items()}


def test_unsolved(runs: dict[str, dict[str, ItemResult]]) -> None:
    messages = failures(runs["unsolved"])
    assert set(messages) == CHECKS
    assert all("Not solved yet" in message for message in messages.values())


def test_solved(runs: dict[str, dict[str, ItemResult]]) -> None:
    assert failures(runs["solved"]) == {}


@pytest.mark.parametrize("name", [name for name, (_, _, says) in WRONG.items() if says])
def test_a_mistake_is_named(name: str, runs: dict[str, dict[str, ItemResult]]) -> None:
    part, _, says = WRONG[name]
    messages = failures(runs[name])
    assert says in messages[f"check-{part}"]
    assert set(messages) == {f"check-{WRONG[other][0]}" for other in ROUNDS[ROUND_OF[name]]}


def test_values_typed_in_fail_the_hidden_probes(runs: dict[str, dict[str, ItemResult]]) -> None:
    assert runs["typed in"]["check-f"].outcome == "hidden"


def test_a_helper_may_have_any_name() -> None:
    """What a check cell computes with stays in it: a student's own `empty` or `exchange_bytes` is not replaced."""
    helpers = {
        "answer-c": changed("c", "if lse > -math.inf]", "if not empty(lse)]")
        + "\n\ndef empty(lse):\n    return lse == -math.inf\n",
        "answer-e": changed("e", "return queries + rows * value_dim * element_bytes + lse",
                            "return exchange_bytes(queries, rows * value_dim * element_bytes, lse)")
        + "\n\ndef exchange_bytes(*parts):\n    return sum(parts)\n",
        "answer-f": changed("f", "batch * tp_bytes", "case(batch, tp_bytes)")
        + "\n\ndef case(batch, tp_bytes):\n    return batch * tp_bytes\n",
    }  # fmt: skip
    assert failures(try_answers(SOLUTION, {"helpers": helpers})["helpers"]) == {}


def test_a_known_mistake_is_told_without_the_general_hint(runs: dict[str, dict[str, ItemResult]]) -> None:
    assert "Of the group's heads" not in failures(runs["own part too"])["check-e"]


def test_the_call_that_is_printed_gives_the_value_that_is_wanted(runs: dict[str, dict[str, ItemResult]]) -> None:
    space: dict[str, Any] = {}
    exec(f"import math\n{SOURCES['answer-f']}", space)
    call, want = re.findall(r"(break_even\(.+?\)) should be (\d+)", failures(runs["rounded down"])["check-f"])[0]
    assert eval(call, space) == int(want)


def test_a_wrong_owner_is_named_by_the_slot(runs: dict[str, dict[str, ItemResult]]) -> None:
    assert "owner" in failures(runs["owner one too far"])["check-a"]


@pytest.mark.parametrize("seed", range(20))
def test_the_merge_checked_against_is_the_engines(seed: int) -> None:
    draw = random.Random(seed)
    parts = [([draw.gauss(0, 2) for _ in range(3)], draw.choice([-math.inf, draw.gauss(0, 4)])) for _ in range(4)]
    values, lse = merged(parts)
    state = merge_parts(
        torch.tensor([values for values, _ in parts])[:, None, None],
        torch.tensor([lse for _, lse in parts])[:, None, None],
    )
    assert state.out.flatten().tolist() == pytest.approx(values, abs=1e-5)
    assert state.lse.item() == pytest.approx(lse, abs=1e-5)
    check_merge(lambda: (values, lse), parts)
    with pytest.raises(CheckFailed):
        check_merge(lambda: (values, lse + 0.01 if lse > -math.inf else 0.0), parts)
