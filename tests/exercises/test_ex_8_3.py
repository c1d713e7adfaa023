"""Exercise 8-3: unsolved it says so, solved it passes, and broken block managers are caught at what they break."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coursekit.authoring import UNSOLVED, failures, try_answers
from coursekit.exercise import Exercise
from coursekit.score import ItemResult

SOLUTION = Path(__file__).parents[2] / "solutions" / "ex_8_3_block_manager.ipynb"
CHECKS = {f"check-{part}" for part in "abcdefg"}
SOURCES = {cell.metadata["nbgrader"]["grade_id"]: cell.source for cell in Exercise.load(SOLUTION).cells("answer")}


def changed(part: str, old: str, new: str) -> str:
    """The reference answer of a part with one piece replaced: how a mistake looks in an otherwise right answer."""
    source = SOURCES[f"answer-{part}"]
    assert old in source, f"the solution of part {part} no longer holds {old!r}"
    return source.replace(old, new)


# Frees as if nothing were in flight, then takes back what is, from the list it goes over: every second block escapes.
PARKS_ONE = """def abort(pool, request):
    free(pool, request)
    for b in pool.free:
        if b in pool.in_flight:
            pool.free.remove(b)
            pool.parked.append(b)


""" + SOURCES["answer-f"].partition("\n\n\n")[2]
# name of the mistake: (part, the answer, words of the message that fits)
WRONG = {
    "logical slot": ("a", changed("a", "table[position // size] * size + position % size", "position"), "no look into"),
    "size left out": ("a", changed("a", "size] * size + position", "size] + position"),
                      "the block's number is not multiplied by the slots of a block"),
    "full block wasted": ("a", changed("a", "n * size - length for", "size - length % size for"),
                          "leaves no slot unused, not a whole block"),
    "block only": ("a", changed("a", "size + position % size", "size"), "without the offset"),
    "one block more": ("a", changed("a", "-(-length // size)", "length // size + 1"), "gets one block more"),
    "rounded down": ("a", changed("a", "-(-length // size)", "length // size"), "rounded down"),
    "total waste": (
        "a", changed("a", "return [n * size - length for n, length in zip(blocks, lengths, strict=True)], sum(blocks)",
                     "return sum(blocks) * size - sum(lengths), sum(blocks)"), "a list of",
    ),
    "no reference": ("b", changed("b", "pool.refs[block] = 1", "pass"), "wrong count: refs[0] is 0"),
    "one too many": ("b", changed("b", "-(-tokens // pool.size)", "tokens // pool.size + 1"), "has 2 blocks; 4 tokens"),
    "half admitted": (
        "b", "def allocate(pool, request, tokens):\n    table = []\n    while len(table) * pool.size < tokens:\n"
        "        if not pool.free:\n            return False\n        table.append(pool.free.pop(0))\n"
        "        pool.refs[table[-1]] = 1\n    pool.tables[request], pool.lengths[request] = table, tokens\n"
        "    return True\n",
        "allocate returned False and should leave the pool exactly as it was, but pool.refs[2] was 0 and is 1",
    ),
    "not taken out": ("b", changed("b", "[pool.free.pop(0) for _ in range(needed)]", "pool.free[:needed]"),
                      "freed but mapped"),
    "no refusal": ("b", changed("b", "return False", "raise MemoryError"), "allocate raised MemoryError"),
    "block each": ("c", changed("c", "position == len(table) * pool.size", "True"), "need 1"),
    "no block, and not asked": ("c", changed("c", "if not pool.free:\n            return None", "pass"),
                               "append raised IndexError in append, at `table.append(pool.free.pop(0))`: pop from "
                               "empty list. The list is empty here: ask whether there is an entry before you take one. "
                               "Where a block is needed and none is free, return None and change nothing."),
    "counted before the refusal": ("c", changed("c", " return None", " return pool.lengths.update({request: 5})"),
                                   "exactly as it was, but pool.lengths['A'] was 4 and is 5"),
    "blocks not whole": ("b", changed("b", "-(-tokens // pool.size)", "tokens / pool.size + 0.5"),
                         "// divides without a rest"),
    "a list as a key": ("b", changed("b", "pool.refs[block] = 1", "pool.refs = {[block]: 1}"), "number or the name"),
    "late block": ("c", changed("c", "position == len(table)", "position > len(table)"), "append raised IndexError"),
    "position for slot": ("c", changed("c", "return table[position // pool.size] * pool.size + position % pool.size",
                                       "return position"), "is slot"),
    "token counted on refusal": ("c", changed("c", "return None", "return position"), "should return None"),
    "not counted": ("c", changed("c", "pool.lengths[request] = position + 1", "pass"),
                    "lengths['A'] is 3, A has 4 tokens"),
    "freed while shared": ("d", changed("d", "if pool.refs[block] == 0:", "if True:"), "freed but mapped"),
    "leak": ("d", changed("d", "pool.free.append(block)", "pass"), "leak: block 0"),
    "double free": ("d", changed("d", "pool.free.append(block)", "pool.free.extend([block, block])"), "double free"),
    "not lowered": ("d", changed("d", "pool.refs[block] -= 1", "pass"), "leak: block 0"),
    "one list": ("d", changed("d", "list(pool.tables[parent])", "pool.tables[parent]"), "one and the same list"),
    "not raised": ("d", changed("d", "pool.refs[block] += 1", "pass"), "wrong count: refs[0] is 1, but 2 tables"),
    "still known": ("d", changed("d", "del pool.lengths[request]", "pass"), "still know it"),
    "no copy on write": ("e", "def append_cow(pool, request):\n    return append(pool, request)\n",
                         "write into a shared block: position 3 of A goes to block 0, which B maps too"),
    "nothing copied": ("e", changed("e", "pool.copy(source, table[i])", "pass"), "must come along"),
    "copied backwards": ("e", changed("e", "pool.copy(source, table[i])", "pool.copy(table[i], source)"),
                         "reads nothing at position 0"),
    "always copied": ("e", changed("e", "position % pool.size and pool.refs[table[i]] > 1", "position % pool.size"),
                      "nobody else maps this block"),
    "full block copied": ("e", changed("e", "position % pool.size and pool.refs[table[i]] > 1",
                                       "pool.refs[table[min(i, len(table) - 1)]] > 1").replace(
        "i = position // pool.size", "i = min(position // pool.size, len(table) - 1)"), "writes into a full one"),
    "table copied": ("e", changed("e", "        pool.refs[table[i]] = 1\n", """        pool.refs[table[i]] = 1
        for j in range(i):
            if pool.refs[table[j]] > 1 and pool.free:
                full, table[j] = table[j], pool.free.pop(0)
                pool.copy(full, table[j])
                pool.refs[full], pool.refs[table[j]] = pool.refs[full] - 1, 1
"""), "2 copies so far, 1 is needed: only the block that is written needs a copy"),
    "raises": ("e", changed("e", "return append(pool, request)", "return append(pool, [request])"),
               "append_cow raised TypeError in append"),
    "source keeps its count": ("e", changed("e", "pool.refs[source] -= 1", "pass"), "wrong count"),
    "copy without room": ("e", changed("e", "if not pool.free:\n            return None",
                                       "if not pool.free:\n            return append(pool, request)"),
                          "should return None"),
    "no references means free": (
        "f", changed("f", "(pool.parked if block in pool.in_flight else pool.free)", "pool.free"),
        "C reads token 5 of A at position 9, where token 9 belongs. Released in flight",
    ),
    "waits for ever": ("f", changed("f", "pool.free.extend(pool.parked)", "pass"), "leak: block"),
    "parked though shared": (
        "f", changed("f", "if pool.refs[block] == 0:", "if block in pool.in_flight or pool.refs[block] == 0:"), "block",
    ),
    "never lands": ("f", changed("f", "pool.in_flight.clear()", "pass"), "still in flight"),
    "parks all": ("f", changed("f", "(pool.parked if block in pool.in_flight else pool.free)", "pool.parked"),
                  "is parked, although the step in flight does not use it"),
    "parks one of two": ("f", PARKS_ONE, "reads token 5 of A at position 5, where token 5 belongs. Released in flight"),
    "parks every other one": (
        "f", changed("f", "if block in pool.in_flight", "if block in pool.in_flight and block % 2"),
        "Released in flight: “abort A” put block 0 into the free list while the submitted step still used it",
    ),
    "swapped": ("g", changed("g", "return branches * each, shared + branches * (each - shared)",
                             "return shared + branches * (each - shared), branches * each"), "in the wrong order"),
    "last token in the group": ("g", changed("g", "* (final_blocks(prompt, output, size)",
                                             "* (-(-(prompt + output) // size)"), "all output tokens enter"),
    "last token in the pool": ("g", changed("g", "// (final_blocks(prompt, output, size) - once))",
                                            "// (-(-(prompt + output) // size) - once))"),
                               "requests_that_fit(222, 2048, 241, 1024) should be 2, and came out as 1"),
    "shared in blocks": ("g", changed("g", "0\n    once = shared // size", "0\n    once = shared"),
                         "it is counted in tokens"),
    "last token": ("g", changed("g", "prompt + output - 1) // size", "prompt + output) // size"),
                   "all output tokens enter the KV"),
    "fork for cache": ("g", changed("g", "(prompt if forked else prompt - 1)", "prompt"), "this is the other one"),
    "cache for fork": ("g", changed("g", "(prompt if forked else prompt - 1)", "(prompt - 1)"), "is the other one"),
    "all apart": ("g", changed("g", "shared + branches * (each - shared)", "branches * each"), "nothing is shared"),
    "parent too": ("g", changed("g", "shared + branches * (each", "shared + (branches + 1) * (each"),
                   "the parent is counted"),
    "prefix each": ("g", changed("g", "return once + requests *", "return requests * once + requests *"),
                    "counted for every request"),
    "prefix free": ("g", changed("g", "(pool_blocks - once) //", "pool_blocks //"), "takes no room"),
    "negative": ("g", changed("g", "max(0, (pool_blocks", "max(-9, (pool_blocks"), "a negative number"),
    "typed in": ("g", "def final_blocks(prompt, output, size=16):\n    return {(2048, 241): 143, (2048, 256): 144,"
                 " (2048, 242): 144, (8192, 256): 528, (1536, 128): 104, (10, 7): 4}[prompt, output]\n"
                 + SOURCES["answer-g"].partition("\n\n\n")[2], ""),
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


@pytest.mark.parametrize("name", [name for name, (_, _, says) in WRONG.items() if says])
def test_a_broken_manager_is_caught_at_what_it_breaks(name: str, runs: dict[str, dict[str, ItemResult]]) -> None:
    part, _, says = WRONG[name]
    assert says in failures(runs[name])[f"check-{part}"]


def test_values_typed_in_fail_the_hidden_probes(runs: dict[str, dict[str, ItemResult]]) -> None:
    assert set(failures(runs["typed in"])) == {"check-g"}


def test_a_later_part_blames_the_earlier_one(runs: dict[str, dict[str, ItemResult]]) -> None:
    """append_cow calls the student's own append: where that is broken, no copy on write is talked of."""
    messages = failures(runs["not counted"])
    assert set(messages) == {"check-c", "check-d", "check-e", "check-f"}
    for part in "def":
        assert "Part c does not pass yet: mend it first" in messages[f"check-{part}"]


BROKEN = {  # what may stand in part c's answer cell: a mistake by which no function comes about
    "syntax error": "def append(pool, request)\n    return None",
    "other name": SOURCES["answer-c"].replace("def append(", "def appended("),
    "deleted": "",
}
SLOT = "table[position // pool.size] * pool.size + position % pool.size"


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, ItemResult]]:
    """Parts that build on one that is not there, or wrong."""
    calls = {"answer-c": SOURCES["answer-c"].replace(SLOT, "slot_of(table, position, pool.size)")}
    wrong = {"answer-a": WRONG["logical slot"][1]}
    variants = {name: {"answer-c": source} for name, source in BROKEN.items()}
    stub = {"answer-b": "def allocate(pool, request, tokens):\n    raise NotImplementedError('part b: write')"}
    return try_answers(SOLUTION, {**variants, "calls slot_of": calls | wrong, "wrong a": wrong, "b unsolved": stub})


@pytest.mark.parametrize("name", BROKEN)
def test_a_function_that_is_not_there_is_the_part_to_mend(name: str, built: dict[str, dict[str, ItemResult]]) -> None:
    messages = failures(built[name])
    assert set(messages) == {"check-c", "check-d", "check-e", "check-f"}
    own = "The answer cell of part c itself fails" if name == "syntax error" else "There is no function append"
    assert messages["check-c"].startswith(own)
    for part in "def":
        assert messages[f"check-{part}"].startswith(
            "Part c does not pass yet: mend it first. There is no function append"
        )


def test_a_wrong_slot_is_named_by_those_who_use_it(built: dict[str, dict[str, ItemResult]]) -> None:
    messages = failures(built["calls slot_of"])
    assert {name for name in messages if "Part a does not pass yet: mend it first" in messages[name]} == {
        "check-c", "check-d", "check-e",
    }  # fmt: skip
    assert set(failures(built["wrong a"])) == {"check-a"}, "who does not call slot_of does not hear of it"


def test_what_builds_on_an_unsolved_part_is_unsolved(built: dict[str, dict[str, ItemResult]]) -> None:
    messages, outcomes = failures(built["b unsolved"]), {item.outcome for item in built["b unsolved"].values()}
    assert outcomes == {"passed", "unsolved"}
    assert {messages[f"check-{part}"] for part in "cdef"} == {
        "Not solved yet: this part uses part b, which is not solved yet. Solve part b first."
    }


def test_no_check_spells_out_an_answer() -> None:
    """What a check cell computes with is the library; the formula of a part stands in none of them."""
    checks = {cell["id"]: cell.source for cell in Exercise.load(SOLUTION).cells("check")}
    assert "//" not in checks["check-g"].replace('"blocks rounded down": tokens // 16', "")
    assert "-(-" not in checks["check-a"] and "- length" not in checks["check-a"]


def test_a_late_part_does_not_spoil_earlier_ones(runs: dict[str, dict[str, ItemResult]]) -> None:
    assert set(failures(runs["no copy on write"])) == {"check-e"}


def test_the_exercise_stays_light() -> None:
    """A class of 200 is graded in minutes only if no submission imports torch."""
    setup = next(cell.source for cell in Exercise.load(SOLUTION).cells("setup"))
    command = [sys.executable, "-c", f"{setup}\nimport sys; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command, cwd=SOLUTION.parents[1], check=False).returncode == 0
