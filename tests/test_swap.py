"""Preemption by swap: what moves, what is computed, and the host memory that may be too small."""

from __future__ import annotations

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.config import EngineConfig, SchedulerConfig
from mini_engine.errors import ConfigError, PoolTooSmall
from mini_engine.sequence import SequenceStatus
from tests.builders import tiny_llama_dir
from tests.scheduling import ShadowMemory, lengths, make_scheduler, run, sequence, step, unrelated

SWAP = {"preemption_mode": "swap"}


@pytest.mark.parametrize("num_blocks, preemptions, moved", [(910, 0, 0), (455, 1, 113)])
def test_the_preemption_of_the_book_computes_nothing_twice(num_blocks, preemptions, moved):
    """records.json, exp_8_3_blocks: 8,188 positions in either pool. The fourth request has 1536 + 270 tokens, of which
    1805 are computed, when it is preempted: 113 blocks of 16."""
    scheduler = make_scheduler(
        num_blocks=num_blocks, max_num_batched_tokens=512, enable_prefix_caching=False, num_host_blocks=128, **SWAP
    )
    memory = ShadowMemory(num_blocks, 16, 128)
    for i in range(4):
        scheduler.add(sequence(str(i), unrelated(i, 1536), 512))
    outputs = []
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        if output.swap_in or output.swap_out or output.block_copies or len(outputs) % 97 == 0:
            memory.forward(output)
        else:
            memory._copy(output)
            _write(memory, output)
        scheduler.update(output, [-1] * len(output.sampled))
        outputs.append(output)
    stats = scheduler.stats
    assert (stats.num_preemptions, stats.num_scheduled_tokens, stats.num_swap_fallbacks) == (preemptions, 8188, 0)
    assert stats.num_swapped_out_blocks == stats.num_swapped_in_blocks == moved
    scheduler.check()


def _write(memory: ShadowMemory, output) -> None:
    """`forward` without its reads, which would be millions."""
    slots = iter(memory.build(output).slot_mapping.tolist())
    for seq, start, num_tokens in output.scheduled:
        for position in range(start, start + num_tokens):
            memory.slots[next(slots)] = memory._prefix(seq, position)


def test_a_swapped_sequence_goes_on_where_it_was():
    scheduler = make_scheduler(block_size=4, num_blocks=5, num_host_blocks=4, enable_prefix_caching=False, **SWAP)
    memory = ShadowMemory(5, 4, 4)
    first, second = (sequence(str(i), unrelated(i, 7), 4) for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(2):
        output = scheduler.schedule()
        memory.forward(output)
        scheduler.update(output, [1, 1])
    output = scheduler.schedule()
    assert output.swap_out == ((3, 0), (4, 1)) and output.preempted == (second,)
    assert (second.num_computed_tokens, second.host_slots, second.block_table) == (8, [0, 1], [])
    memory.forward(output)
    scheduler.update(output, [1])
    scheduler.check()
    outputs = run(scheduler, lambda seq: 1, memory)
    back = next(output for output in outputs if output.swap_in)
    assert back.scheduled[0][1:] == (8, 1) and [slot for slot, _ in back.swap_in] == [0, 1]
    assert [block for _, block in back.swap_in] == second.block_table[:2] or second.block_table == []
    assert scheduler.stats.num_scheduled_tokens == 2 * (7 + 4 - 1)


def test_what_the_prefix_cache_still_knows_is_not_fetched():
    """Four blocks of the victim go to the host. Two are still found in the pool when it comes back."""
    scheduler = make_scheduler(block_size=4, num_blocks=7, num_host_blocks=9, **SWAP)
    memory = ShadowMemory(7, 4, 9)
    first, second = sequence("0", unrelated(0, 8), 6), sequence("1", unrelated(1, 14), 4)
    scheduler.add(first)
    scheduler.add(second)
    outputs = run(scheduler, lambda seq: 1, memory)
    out, back = (next(o for o in outputs if getattr(o, name)) for name in ("swap_out", "swap_in"))
    assert (len(out.swap_out), len(back.swap_in)) == (4, 2)
    assert lengths(back)["1"] == 1, "it goes on after its last computed token"
    assert scheduler.stats.prefix_hit_tokens == 8 and second.num_cached_tokens == 0
    assert scheduler.host.check([]) is None


@pytest.mark.parametrize("slots, swapped", [(2, 2), (1, 0)])
def test_a_full_host_means_recompute(slots, swapped):
    scheduler = make_scheduler(block_size=4, num_blocks=5, num_host_blocks=slots, enable_prefix_caching=False, **SWAP)
    requests = [sequence(str(i), unrelated(i, 7), 4) for i in range(2)]
    for seq in requests:
        scheduler.add(seq)
    run(scheduler, lambda seq: 1, ShadowMemory(5, 4, slots))
    stats = scheduler.stats
    assert (stats.num_swapped_out_blocks, stats.num_swap_fallbacks) == (swapped, 0 if swapped else 1)
    assert stats.num_scheduled_tokens == 20 + (0 if swapped else 8)
    assert [seq.num_output_tokens for seq in requests] == [4, 4]


def test_an_abort_gives_the_host_its_slots_back():
    scheduler = make_scheduler(block_size=4, num_blocks=5, num_host_blocks=2, enable_prefix_caching=False, **SWAP)
    requests = [sequence(str(i), unrelated(i, 8), 9) for i in range(2)]
    for seq in requests:
        scheduler.add(seq)
    step(scheduler)
    step(scheduler)
    assert requests[1].host_slots == [0, 1]
    scheduler.check()
    scheduler.finish(requests[1], SequenceStatus.FINISHED_ABORTED)
    assert requests[1].host_slots == []
    scheduler.check()


def test_a_copy_that_was_never_done_is_swapped_from_its_source():
    """A sibling loses its blocks in the very step that gave it a copy of its tail: the content is in the source."""
    scheduler = make_scheduler(
        scheduling_policy="priority",
        block_size=4,
        num_blocks=5,
        long_prefill_token_threshold=4,
        num_host_blocks=9,
        **SWAP,
    )
    memory = ShadowMemory(5, 4, 9)
    low, high = (sequence("low", unrelated(0, 6), 4, n=2, priority=1), sequence("high", unrelated(1, 4), 4))
    for arriving in (low, high):
        scheduler.add(arriving)
        output = scheduler.schedule()
        memory.forward(output)
        scheduler.update(output, [seq.index for seq, _ in output.sampled])
    output = scheduler.schedule()
    assert {seq.request_id for seq in output.preempted} == {"low"} and len(output.preempted) == 2
    assert [block for block, _ in output.swap_out].count(2) == 2, "both siblings' tail is still block 2"
    memory.forward(output)
    scheduler.update(output, [4])
    run(scheduler, lambda seq: seq.index, memory)
    assert scheduler.stats.num_swapped_in_blocks > 0


def test_a_failed_step_is_not_trusted_to_have_swapped():
    scheduler = make_scheduler(block_size=4, num_blocks=5, num_host_blocks=2, enable_prefix_caching=False, **SWAP)
    memory = ShadowMemory(5, 4, 2)
    requests = [sequence(str(i), unrelated(i, 8), 9) for i in range(2)]
    for seq in requests:
        scheduler.add(seq)
    output = scheduler.schedule()
    memory.forward(output)
    scheduler.update(output, [1, 1])
    output = scheduler.schedule()
    assert output.swap_out
    scheduler.undo(output)
    assert all(seq.num_computed_tokens == 0 and seq.host_slots == [] for seq in requests)
    scheduler.check()
    run(scheduler, lambda seq: 1, memory)


def test_a_sequence_that_is_being_swapped_in_is_in_flight_before_it_computes():
    """A member of a fixed batch that the budget leaves no tokens for: the copy still writes its blocks."""
    scheduler = make_scheduler(
        block_size=4,
        num_blocks=8,
        num_host_blocks=9,
        batching="fixed",
        scheduling_policy="priority",
        max_num_batched_tokens=1,
        **SWAP,
    )
    requests = [sequence(str(i), unrelated(i, 9), 5) for i in range(2)]
    for seq in requests:
        scheduler.add(seq)
    step(scheduler)
    member = requests[1]  # as if it had been preempted after 4 tokens, and its first batch had ended
    scheduler.finish(requests[0], SequenceStatus.FINISHED_ABORTED)
    member.num_computed_tokens = 4
    assert scheduler.host.swap_out(member, ()) == ((member.block_table[0], 0),)
    scheduler._preempt(member)
    scheduler.add(sequence("first", unrelated(7, 4), 3, priority=-1))
    output = scheduler.schedule()
    assert lengths(output) == {"first": 1} and output.swap_in == ((0, member.block_table[0]),)
    scheduler.finish(member, SequenceStatus.FINISHED_ABORTED)
    assert scheduler.blocks.in_flight == [member]
    scheduler.update(output, [1] * len(output.sampled))
    scheduler.check()


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: EngineConfig(preemption_mode="swap"), ConfigError, "preemption_mode 'swap'.*swap_space_bytes above 0"),
        (lambda: SchedulerConfig(preemption_mode="swap"), ConfigError, "preemption_mode 'swap'.*num_host_blocks"),
        (lambda: EngineConfig(preemption_mode="drop"), ConfigError, "one of recompute, swap, got 'drop'"),  # type: ignore[arg-type]
        (lambda: EngineConfig(swap_space_bytes=-1), ConfigError, "swap_space_bytes .*at least 0, got -1"),
    ],
)
def test_refusals(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_a_host_too_small_for_one_block(tmp_path):
    model = str(tiny_llama_dir(tmp_path))
    with pytest.raises(PoolTooSmall, match=r"swap_space_bytes 100 holds no block of 4,096 bytes \(8 tokens\)"):
        LLM(model, dtype="float32", block_size=8, preemption_mode="swap", swap_space_bytes=100)
    llm = LLM(model, dtype="float32", block_size=8, preemption_mode="swap", swap_space_bytes=10_000)
    assert llm.engine.runner.host is not None and llm.engine.runner.host.nbytes == 2 * 4096
    assert LLM(model, dtype="float32", swap_space_bytes=1 << 20).engine.runner.host is None
    assert llm.generate("the", SamplingParams(max_tokens=2))[0].finished
