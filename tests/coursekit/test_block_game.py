"""The referee of exercise 8-3: its own rules against the engine's block manager, and that it sees what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coursekit.block_game import Referee, play
from coursekit.checks import CheckFailed
from coursekit.exercise import Exercise
from coursekit.game_pool import Pool, changed, early, fault
from mini_engine.block_manager import BlockManager
from mini_engine.sequence import Sequence

SOLUTION = Path(__file__).parents[2] / "solutions" / "ex_8_3_block_manager.ipynb"
BLOCKS, SIZE = 9, 3


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """The functions of the reference solution, under the names the referee calls them by."""
    space: dict[str, Any] = {}
    for cell in Exercise.load(SOLUTION).cells("answer"):
        exec(cell.source, space)
    return {name: space[name] for name in ("allocate", "fork", "free", "abort", "land")} | {
        "append": space["append_cow"]
    }


class Engine:
    """The same moves on the engine's own block manager, whose pool has one block more: the null block."""

    def __init__(self, num_blocks: int, size: int):
        self.blocks = BlockManager(num_blocks + 1, size, enable_prefix_caching=False)
        self.seqs: dict[str, Sequence] = {}
        self.copies = 0

    def allocate(self, request: str, tokens: str) -> None:
        seq = Sequence(request, [0] * int(tokens))
        if self.blocks.blocks_for(seq.num_tokens) <= self.blocks.num_free_blocks:
            self.blocks.admit(seq, [])
            seq.num_computed_tokens = seq.num_tokens
            self.seqs[request] = seq

    def append(self, request: str) -> None:
        seq = self.seqs[request]
        copies = self.blocks.grow(seq, seq.num_tokens + 1)
        if copies is not None:
            self.copies += len(copies)
            self.blocks.pool.unhold(copies)
            seq.token_ids.append(0)
            seq.num_computed_tokens += 1

    def fork(self, parent: str, child: str) -> None:
        self.seqs[child] = Sequence(child, list(self.seqs[parent].token_ids))
        self.seqs[child].num_computed_tokens = self.seqs[parent].num_computed_tokens
        self.blocks.fork(self.seqs[parent], self.seqs[child])

    def free(self, request: str) -> None:
        self.blocks.free(self.seqs.pop(request))

    def state(self) -> list[Any]:
        names: dict[int, int] = {}
        tables = {
            name: [names.setdefault(block, len(names)) for block in seq.block_table]
            for name, seq in sorted(self.seqs.items())
        }
        return [self.blocks.num_free_blocks, self.copies, tables]


@settings(max_examples=60)
@given(data=st.data())
def test_the_solution_shares_as_the_engine_does(answers: dict[str, Any], data: st.DataObject) -> None:
    """Any game: the same number of free blocks and of copies, and tables that share alike, after every move."""
    engine, referee, born = Engine(BLOCKS, SIZE), Referee(BLOCKS, SIZE, answers), 0
    alive: list[str] = []
    for _ in range(data.draw(st.integers(1, 25))):
        verbs = ["allocate", *(["append", "append", "fork", "free"] if alive else [])]
        verb, name = data.draw(st.sampled_from(verbs)), f"r{born}"
        who = data.draw(st.sampled_from(alive)) if alive and verb != "allocate" else ""
        move = {
            "allocate": f"allocate {name} {data.draw(st.integers(1, 10))}",
            "append": f"append {who}",
            "fork": f"fork {who} {name}",
            "free": f"free {who}",
        }[verb]
        (state,) = referee.play(move)
        words = move.split()
        getattr(engine, words[0])(*words[1:])
        assert state == engine.state(), move
        alive, born = list(engine.seqs), born + (verb in ("allocate", "fork"))


def test_a_release_in_flight_gives_another_the_wrong_token(answers: dict[str, Any]) -> None:
    """What the referee sees is the wrong token itself, not only the early release."""
    game = "allocate A 6; allocate B 3; submit; abort A; allocate C 12; land; allocate D 12"
    with pytest.raises(CheckFailed, match="C reads token 5 of A at position 9, where token 9 belongs. Released in fl"):
        play(game, 4, 4, **answers | {"abort": answers["free"]})
    states = play(game, 4, 4, **answers)
    assert [free for free, _, _ in states] == [2, 1, 1, 1, 1, 3, 0], "A's blocks come free when the step has landed"


def test_an_early_release_without_harm_is_still_told(answers: dict[str, Any]) -> None:
    with pytest.raises(CheckFailed, match="Released in flight"):
        play("allocate A 4; submit; abort A", 4, 4, **answers | {"abort": answers["free"]})


DAMAGE = {
    "double free": (lambda pool: pool.free.append(pool.free[0]), "double free: block 3 is 2 times"),
    "freed but mapped": (lambda pool: pool.free.append(1), "freed but mapped: block 1"),
    "leak": (lambda pool: pool.free.remove(3), "leak: block 3"),
    "count": (lambda pool: pool.refs.__setitem__(0, 1), "wrong count: refs[0] is 1, but 2 tables map block 0"),
    "twice": (lambda pool: pool.tables["A"].append(1), "twice in the table of A"),
    "no block": (lambda pool: pool.tables["A"].append(9), "maps 9, which is no block"),
    "too long": (lambda pool: pool.lengths.__setitem__("B", 9), "has 2 blocks; 9 tokens in blocks of 4 need 3"),
    "unknown": (lambda pool: pool.lengths.pop("B"), "tables knows ['A', 'B'], lengths knows ['A']"),
    "parked": (lambda pool: (pool.free.remove(4), pool.parked.append(4)), "block 4 is parked, although no step"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_fault_sees(damage: str) -> None:
    pool = Pool(5, 4)
    pool.free, pool.refs = [3, 4], [2, 1, 1, 0, 0]
    pool.tables, pool.lengths = {"A": [0, 1], "B": [0, 2]}, {"A": 7, "B": 5}
    assert fault(pool) == "" and early(pool) == []
    change, says = DAMAGE[damage]
    change(pool)
    assert says in fault(pool)


def test_copy_moves_what_the_slots_hold() -> None:
    pool = Pool(2, 2)
    pool.slots[2:] = [("A", 0), ("A", 1)]
    pool.copy(1, 0)
    assert pool.slots == [("A", 0), ("A", 1)] * 2 and pool.num_copies == 1


@pytest.mark.parametrize(
    "script, says",
    [
        ("alocate A 4", "there is no move 'alocate'; there are allocate, append"),
        ("allocate A", "the move is written “allocate REQUEST TOKENS”"),
        ("submit A", "the move is written “submit”"),
        ("allocate A four", "'four' is no number of tokens"),
        ("allocate A 0", "'0' is no number of tokens"),
        ("append B", "there is no request B"),
        ("allocate A 4; free A; append A", "After “allocate A 4; free A; append A”: there is no request A"),
        ("allocate A 4; allocate A 4", "there is a request A already"),
        ("allocate A 4; fork A A", "there is a request A already"),
        ("allocate A 4; fork B C", "there is no request B"),
    ],
)
def test_a_script_that_makes_no_sense_is_told_so(answers: dict[str, Any], script: str, says: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        play(script, 4, 4, **answers)
    assert says in str(caught.value)


def test_a_move_without_a_function_is_told(answers: dict[str, Any]) -> None:
    with pytest.raises(CheckFailed, match="play was given no function for fork: add fork=… to the call"):
        play("allocate A 4; fork A B", 4, 4, allocate=answers["allocate"])


def test_changed_names_the_first_thing_that_is_not_as_it_was() -> None:
    before, pool = Pool(3, 4), Pool(3, 4)
    pool.free.reverse()
    assert changed(before, pool) == "", "the order of the free list is the student's own affair"
    pool.free.pop()
    assert changed(before, pool) == "pool.free was [0, 1, 2] and is [1, 2]"
    pool.refs[0] = 1
    assert changed(before, pool) == "pool.refs[0] was 0 and is 1"
    pool.tables["A"] = [0]
    assert changed(before, pool) == "pool.tables['A'] was None and is [0]"


@pytest.mark.parametrize("in_flight, why", [({0}, "the step in flight does not use it"), (set(), "no step is in fl")])
def test_a_parked_block_is_blamed_for_what_is_true(in_flight: set[int], why: str) -> None:
    pool = Pool(2, 4)
    pool.free, pool.parked, pool.in_flight = [], [0, 1], in_flight
    assert f"is parked, although {why}" in fault(pool)


def test_one_table_maps(answers: dict[str, Any]) -> None:
    pool = Pool(1, 4)
    pool.free, pool.tables, pool.lengths = [], {"A": [0]}, {"A": 3}
    assert fault(pool) == "wrong count: refs[0] is 0, but 1 table maps block 0"
