"""The pool as data, moment by moment, and the prefix cache as a tree."""

from __future__ import annotations

import json

import pytest

from mini_engine.pool_view import STATES, record, view
from mini_engine.prefix_tree import prefix_tree, render
from mini_engine.scheduler import Scheduler
from mini_engine.sequence import SequenceStatus
from tests.scheduling import free_queue, make_scheduler, run, sequence, step, unrelated


def states(scheduler: Scheduler) -> dict[str, list[int]]:
    blocks = view(scheduler).blocks
    return {state: [b.block_id for b in blocks if b.state == state] for state in STATES}


def test_every_state_a_block_can_be_in():
    scheduler = make_scheduler(block_size=4, num_blocks=12)
    done, one = sequence("done", unrelated(9, 9), 1), sequence("one", unrelated(0, 6), 9, n=2)
    scheduler.add(done)
    step(scheduler)
    scheduler.add(one)
    scheduler.add(sequence("other", unrelated(1, 5), 9))
    step(scheduler, lambda seq: seq.index)
    flying = scheduler.schedule()
    other = next(seq for seq in scheduler.running if seq.request_id == "other")
    scheduler.finish(other, SequenceStatus.FINISHED_ABORTED)
    seen = states(scheduler)
    now = view(scheduler)
    assert (seen["null"], seen["shared"], len(seen["used"])) == ([0], [one.block_table[0]], 2)
    assert seen["in flight"] == sorted(other.block_table) and now.tables["other"] == tuple(other.block_table)
    assert seen["cached-free"] == [b.block_id for b in now.blocks if b.state == "cached-free" and b.hash] != []
    assert list(now.free_queue) == free_queue(scheduler) and set(now.free_queue) == {
        *seen["free"],
        *seen["cached-free"],
    }
    assert list(now.tables) == ["one", "one.1", "other"]
    shared = now.blocks[one.block_table[0]]
    assert (shared.owners, shared.ref_count, shared.filled) == (("one", "one.1"), 2, 4)
    assert now.blocks[one.block_table[1]].filled == 3 and len(shared.hash or "") == 8
    assert now.num_used + len(now.free_queue) == 11 and now.num_references == 6
    scheduler.update(flying, [0] * len(flying.sampled))
    assert states(scheduler)["in flight"] == []


def test_a_view_is_data_and_stays_what_it_was():
    scheduler = make_scheduler(block_size=4, num_blocks=7, num_host_blocks=8, preemption_mode="swap")
    for i in range(2):
        scheduler.add(sequence(str(i), unrelated(i, 9), 6))
    views = record(scheduler, lambda: step(scheduler))
    texts = [json.dumps(each.to_dict()) for each in views]
    assert len(set(texts)) == len(views) and views[0].num_used == views[-1].num_used == 0
    assert [each.step for each in views] == list(range(len(views)))
    on_host = [each for each in views if each.on_host]
    assert on_host and all(each.waiting == ("1",) and each.on_host["1"] == 3 for each in on_host)
    assert json.loads(texts[1])["tables"] == {"0": [1, 2, 3], "1": [4, 5, 6]}
    assert not scheduler.has_unfinished()


def test_recording_can_be_cut_short():
    scheduler = make_scheduler()
    scheduler.add(sequence("r", unrelated(0, 5), 50))
    assert len(record(scheduler, lambda: step(scheduler), max_steps=3)) == 4


def test_a_tree_branches_where_prompts_differ():
    scheduler = make_scheduler(block_size=4, num_blocks=40)
    common = list(unrelated(0, 8))
    for salt, prompt in (
        (None, [*common, *unrelated(1, 9)]),
        (None, [*common, *unrelated(2, 5)]),
        (None, [*common, *unrelated(1, 4), *unrelated(3, 4), 1]),
        ("mine", common),
    ):
        scheduler.add(sequence("r", prompt, 1, cache_salt=salt))
        run(scheduler)
    first, second = prefix_tree(scheduler.blocks)
    assert [(before, node.num_tokens) for before, node in first.walk()] == [(0, 8), (8, 4), (12, 4), (12, 4), (8, 4)]
    assert first.key is not None and first.key.salt is None and first.num_free == 2
    assert second.key is not None and second.key.salt == "mine" and second.num_tokens == 8
    total = sum(len(node.block_ids) for tree in (first, second) for _, node in tree.walk())
    assert total == len(scheduler.blocks.pool.cached)
    assert render([first, second]).splitlines()[0] == "├─ 8 tokens, blocks 1-2, free"
    assert render([first, second]).splitlines()[-1].startswith("└─ 8 tokens, blocks ")
    assert render([second]).endswith("free, under mine")


def test_a_branch_whose_beginning_is_gone_is_no_longer_in_the_tree():
    scheduler = make_scheduler(block_size=4, num_blocks=8)
    scheduler.add(sequence("r", unrelated(0, 17), 1))
    run(scheduler)
    pool = scheduler.blocks.pool
    first = next(block for block in pool.cached.values() if not isinstance(block.parent_hash, int))
    pool.forget(first)
    assert len(pool.cached) == 3 and prefix_tree(scheduler.blocks) == ()


@pytest.mark.parametrize("rounds", [1, 4])
def test_the_tree_of_growing_rounds(rounds):
    """Each prompt keeps all but the last 4 tokens of the one before (experiment 8-4): a trunk with short twigs."""
    scheduler = make_scheduler(num_blocks=2730)
    prompt: list[int] = []
    for i, length in enumerate((210, 316, 670, 884)[:rounds]):
        prompt = prompt[:-4] + list(unrelated(i, length - max(0, len(prompt) - 4)))
        scheduler.add(sequence("r", prompt, 1))
        run(scheduler)
    (tree,) = prefix_tree(scheduler.blocks)
    longest = max(before + node.num_tokens for before, node in tree.walk())
    assert longest == 16 * ((210, 884)[rounds > 1] // 16)
    assert sum(node.num_free for _, node in tree.walk()) == len(scheduler.blocks.pool.cached)


def test_the_picture_says_what_the_view_holds():
    matplotlib = pytest.importorskip("matplotlib")
    from coursekit.figures.blocks import describe, owners_of, pool_grid

    scheduler = make_scheduler(block_size=4, num_blocks=8)
    scheduler.add(sequence("A", unrelated(0, 6), 9, n=2))
    views = record(scheduler, lambda: step(scheduler, lambda seq: seq.index), max_steps=2)
    figure = pool_grid(views[-1], owners_of(views))
    said = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
    assert {"null", "× 2", "A", "A.1", "4/4", "3/4", "given out next: 4 5 6 7"} <= set(said)
    assert sum(patch.get_hatch() == "///" for patch in figure.axes[0].patches) == 1
    words = describe(views[-1])
    assert "A has blocks 1 3; A.1 has blocks 1 2; shared: 1; free, the next one first: 4 5 6 7." in words
    assert owners_of(views) == ["A", "A.1"]
