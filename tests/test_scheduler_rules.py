"""The scheduler's own rules: fixed batches, reserving, seats, stops, ends and failed steps."""

from __future__ import annotations

import pytest

from mini_engine.scheduler import Scheduler
from mini_engine.sequence import SequenceStatus
from tests.scheduling import ShadowMemory, lengths, make_scheduler, run, sequence, step, unrelated

ABORTED = SequenceStatus.FINISHED_ABORTED


def test_reserving_never_preempts_in_the_same_pool():
    """Case 13 with the whole generation set aside: three fit 454 blocks, the fourth waits."""
    scheduler = make_scheduler(
        num_blocks=455, max_num_batched_tokens=512, enable_prefix_caching=False, admission="reserve"
    )
    for i in range(4):
        scheduler.add(sequence(str(i), unrelated(i, 1536), 512))
    outputs = run(scheduler)
    assert scheduler.stats.num_preemptions == 0
    assert scheduler.stats.num_scheduled_tokens == 8188
    assert scheduler.stats.peak_used_blocks == 3 * 128
    assert max(len(output.scheduled) for output in outputs) == 3


def test_a_fixed_batch_ends_before_the_next():
    scheduler = make_scheduler(batching="fixed", max_num_seqs=2)
    for i, output in enumerate((5, 2, 3)):
        scheduler.add(sequence(str(i), unrelated(i, 4), output))
    together = [set(lengths(output)) for output in run(scheduler)]
    assert together == [{"0", "1"}, {"0", "1"}, {"0"}, {"0"}, {"0"}, {"2"}, {"2"}, {"2"}]


def test_a_fixed_batch_is_put_together_beyond_the_budget():
    """All members are chosen at once, though the budget lets the later ones start in later steps."""
    scheduler = make_scheduler(batching="fixed", max_num_seqs=3, max_num_batched_tokens=4)
    for i in range(4):
        scheduler.add(sequence(str(i), unrelated(i, 4), 4))
    assert lengths(step(scheduler)) == {"0": 4}
    assert [seq.request_id for seq in scheduler.running] == ["0", "1", "2"]
    assert lengths(step(scheduler)) == {"0": 1, "1": 3}
    assert all("3" not in lengths(output) for output in run(scheduler)[:-4])


def test_without_chunks_a_prompt_waits_for_a_whole_step():
    scheduler = make_scheduler(enable_chunked_prefill=False, max_model_len=10, max_num_batched_tokens=10)
    for i in range(2):
        scheduler.add(sequence(str(i), unrelated(i, 6), 2))
    assert [lengths(step(scheduler)) for _ in range(3)] == [{"0": 6}, {"0": 1, "1": 6}, {"1": 1}]


def test_seats_count_siblings_from_the_start():
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=5)
    scheduler.add(sequence("0", unrelated(0, 12), 2, n=3))
    scheduler.add(sequence("1", unrelated(1, 1), 2, n=2))
    scheduler.add(sequence("2", unrelated(2, 1), 2))
    seen = [lengths(step(scheduler)) for _ in range(3)]
    assert seen == [{"0": 5}, {"0": 5}, {"0": 2}], "3 seats are taken before the siblings exist; none overtakes"
    assert len(scheduler.running) == 3
    run(scheduler)


@pytest.mark.parametrize("num_blocks, together", [(7, True), (5, True), (4, False)])
def test_shared_blocks_need_no_room(num_blocks, together):
    """Two prompts of 3 blocks that share 2: the second needs one free block, not three."""
    scheduler = make_scheduler(block_size=4, num_blocks=num_blocks)
    for i in range(2):
        scheduler.add(sequence(str(i), [*unrelated(0, 8), *unrelated(i + 1, 2)], 2))
    assert lengths(step(scheduler)) == ({"0": 10, "1": 2} if together else {"0": 10})
    run(scheduler)


def test_reserving_counts_the_copies_to_come():
    """Siblings that have just branched off will copy their tail; nobody else is given that block in the same step."""
    scheduler = make_scheduler(
        admission="reserve", block_size=4, num_blocks=5, long_prefill_token_threshold=4, max_num_batched_tokens=16
    )
    scheduler.add(sequence("family", unrelated(0, 6), 2, n=2))
    step(scheduler)
    scheduler.add(sequence("next", unrelated(1, 8), 1))
    assert lengths(step(scheduler)) == {"family": 2}
    run(scheduler)
    assert scheduler.stats.num_preemptions == 0


def test_a_victim_takes_its_copy_along():
    """Two siblings have been given a copy of their tail in this very step when a better one needs their blocks."""
    scheduler = make_scheduler(scheduling_policy="priority", block_size=4, num_blocks=5, long_prefill_token_threshold=4)
    memory = ShadowMemory(5, 4)
    low, high = (sequence("low", unrelated(0, 6), 4, n=2, priority=1), sequence("high", unrelated(1, 4), 4))
    for arriving, computed in ((low, {"low": 4}), (high, {"low": 2, "high": 4})):
        scheduler.add(arriving)
        output = scheduler.schedule()
        assert lengths(output) == computed
        memory.forward(output)
        scheduler.update(output, [seq.index for seq, _ in output.sampled])
    output = scheduler.schedule()
    assert lengths(output) == {"high": 1} and {seq.request_id for seq in output.preempted} == {"low"}
    assert len(output.preempted) == 2 and output.block_copies == ()
    assert scheduler.blocks.num_free_blocks == 4 - 2, "both ends of the copy are free again"
    memory.forward(output)
    scheduler.update(output, [4])
    run(scheduler, lambda seq: seq.index, memory)
    assert scheduler.blocks.num_free_blocks == 4


def test_stop_tokens():
    scheduler = make_scheduler()
    eos = frozenset({9})
    requests = {
        "stops": sequence("stops", [1], 8, eos_token_ids=eos),
        "own": sequence("own", [2], 8, stop_token_ids=(4,), eos_token_ids=eos, ignore_eos=True),
        "ignores": sequence("ignores", [3], 4, eos_token_ids=eos, ignore_eos=True),
        "late": sequence("late", [4], 8, eos_token_ids=eos, min_tokens=3),
    }
    for seq in requests.values():
        scheduler.add(seq)
    drawn = {"stops": [1, 9], "own": [9, 4], "ignores": [9] * 4, "late": [9, 9, 9]}
    run(scheduler, lambda seq: drawn[seq.request_id][seq.num_output_tokens])
    assert {name: seq.output_token_ids for name, seq in requests.items()} == drawn
    assert [seq.status.value for seq in requests.values()] == ["stop", "stop", "length", "stop"]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_finish_frees_at_once(steps):
    scheduler = make_scheduler(max_num_batched_tokens=8)
    keep, end = sequence("keep", unrelated(0, 6), 5), sequence("end", unrelated(1, 9), 9, n=1 if steps > 1 else 3)
    scheduler.add(keep)
    scheduler.add(end)
    for _ in range(steps):
        step(scheduler)
    scheduler.finish(end, ABORTED)
    scheduler.finish(end, SequenceStatus.FINISHED_STOPPED)
    assert end.status is ABORTED and end.block_table == [] and end.num_forks == 0
    scheduler.blocks.check(scheduler.running)
    run(scheduler)
    assert keep.num_output_tokens == 5 and not scheduler.has_unfinished()
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_usable_blocks


def test_a_sequence_ended_during_a_step_gets_no_token():
    scheduler = make_scheduler()
    seqs = [sequence(str(i), unrelated(i, 6), 5) for i in range(2)]
    for seq in seqs:
        scheduler.add(seq)
    output = scheduler.schedule()
    scheduler.finish(seqs[0], ABORTED)
    assert scheduler.update(output, [1, 2]) == []
    assert [seq.output_token_ids for seq in seqs] == [[], [2]]
    scheduler.blocks.check(scheduler.running)


def test_update_wants_one_token_a_sampled_sequence():
    scheduler = make_scheduler()
    scheduler.add(sequence("r", [1, 2], 5))
    with pytest.raises(ValueError, match="shorter"):
        scheduler.update(scheduler.schedule(), [])


def failed_step(scheduler: Scheduler, memory: ShadowMemory) -> None:
    output = scheduler.schedule()
    memory.fail(output)
    scheduler.undo(output)
    scheduler.blocks.check(scheduler.running)


@pytest.mark.parametrize("before", [0, 1, 2, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_step_is_computed_anew(before, n):
    """Nothing that the step was to write is ever read: not by its own sequences, nor through the prefix cache."""
    scheduler = make_scheduler(max_num_batched_tokens=8, block_size=4)
    memory = ShadowMemory(scheduler.config.num_blocks, 4)
    requests = [sequence(str(i), unrelated(0, 10), 6, n=n) for i in range(2)]
    for seq in requests:
        scheduler.add(seq)
    drawn: dict[tuple[str, int], int] = {}
    for i in range(200):
        if i == before:
            failed_step(scheduler, memory)
            assert not scheduler.running and scheduler.blocks.pool.cached == {}
        if not scheduler.has_unfinished():
            break
        output = scheduler.schedule()
        memory.forward(output)
        scheduler.update(output, [seq.index for seq, _ in output.sampled])
        scheduler.blocks.check(scheduler.running)
        for seq, _ in output.sampled:
            drawn[seq.request_id, seq.index] = seq.num_output_tokens
    assert drawn == {(str(i), j): 6 for i in range(2) for j in range(n)}


def test_siblings_of_a_failed_step_are_not_left_behind():
    """Nobody outside has seen them yet, so an abort of the one known sequence must end the request."""
    scheduler = make_scheduler()
    seq = sequence("r", unrelated(0, 10), 6, n=3)
    scheduler.add(seq)
    failed_step(scheduler, ShadowMemory(scheduler.config.num_blocks, 16))
    scheduler.finish(seq, ABORTED)
    assert not scheduler.has_unfinished()


def test_a_request_ended_during_a_failed_step_is_gone():
    scheduler = make_scheduler()
    seq = sequence("r", unrelated(0, 10), 6, n=3)
    scheduler.add(seq)
    output = scheduler.schedule()
    scheduler.finish(seq, ABORTED)
    scheduler.undo(output)
    assert not scheduler.has_unfinished() and seq.num_forks == 0


def test_counters_of_the_prefix_cache():
    scheduler = make_scheduler(block_size=4)
    for i in range(3):
        scheduler.add(sequence(str(i), [*unrelated(0, 9), i], 2))
        run(scheduler)
    stats = scheduler.stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (30, 16)
