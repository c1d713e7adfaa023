"""The scheduler, case by case of the conformance list: 9 to 15 and 20 to 24."""

from __future__ import annotations

import re

import pytest

from mini_engine.errors import PoolTooSmall, RequestError
from mini_engine.sequence import SequenceStatus
from tests.scheduling import ShadowMemory, free_queue, lengths, make_scheduler, run, sequence, step, unrelated


@pytest.mark.parametrize(
    "budget, threshold, prompts, steps",
    [
        pytest.param(
            1024, 400, (800, 800, 800), [(400, 400, 224), (400, 400, 224), (1, 1, 352), (1, 1, 1)], id="case-9"
        ),
        pytest.param(10, 4, (6, 9, 3), [(4, 4, 2), (2, 4, 1), (1, 1, 1), (1, 1, 1)], id="case-9-small"),
        pytest.param(8, 0, (20, 3), [(8,), (8,), (4, 3), (1, 1)], id="no-threshold"),
        pytest.param(5, 0, (3, 9), [(3, 2), (1, 4), (1, 3), (1, 1)], id="decode-first"),
        pytest.param(1, 0, (2, 1), [(1,), (1,), (1,)], id="one-token-a-step"),
    ],
)
def test_chunks(budget, threshold, prompts, steps):
    scheduler = make_scheduler(max_num_batched_tokens=budget, long_prefill_token_threshold=threshold)
    for i, length in enumerate(prompts):
        scheduler.add(sequence(str(i), unrelated(i, length)))
    for expected in steps:
        assert lengths(step(scheduler)) == {str(i): n for i, n in enumerate(expected)}


@pytest.mark.parametrize("budget", [1, 7, 4096])
@pytest.mark.parametrize("prompt, output", [(20, 16), (1, 1), (64, 3), (5, 40)])
def test_tokens_scheduled_in_all(prompt, output, budget):
    """case-10: prompt + m - 1, since the last token drawn is never computed."""
    scheduler = make_scheduler(max_num_batched_tokens=budget, block_size=4)
    seq = sequence("r", unrelated(0, prompt), output)
    scheduler.add(seq)
    outputs = run(scheduler)
    assert sum(output.num_tokens for output in outputs) == prompt + output - 1
    assert scheduler.stats.num_scheduled_tokens == prompt + output - 1
    assert (seq.num_output_tokens, seq.status) == (output, SequenceStatus.FINISHED_LENGTH)


@pytest.mark.parametrize(
    "policy, priorities, order",
    [
        pytest.param("priority", (2, 0, 1), "120", id="case-11"),
        pytest.param("priority", (1, 1, 0, 1), "2013", id="case-11-ties"),
        pytest.param("priority", (-1, 5, -3), "201", id="case-11-negative"),
        pytest.param("fcfs", (2, 0, 1), "012", id="fcfs"),
    ],
)
def test_order_of_admission(policy, priorities, order):
    scheduler = make_scheduler(scheduling_policy=policy, max_num_seqs=1)
    for i, priority in enumerate(priorities):
        scheduler.add(sequence(str(i), unrelated(i, 5), 1, priority=priority))
    assert "".join(item.seq.request_id for output in run(scheduler) for item in output.scheduled) == order


@pytest.mark.parametrize(
    "policy, priorities, victims",
    [
        pytest.param("priority", (2, 0, 1), "0", id="case-11"),
        pytest.param("priority", (1, 0, 1), "2", id="case-11-latest-of-the-worst"),
        pytest.param("fcfs", (2, 0, 1), "2", id="fcfs-latest"),
    ],
)
def test_victim(policy, priorities, victims):
    """Three sequences fill the pool; the first that needs another block takes it from the last in rank."""
    scheduler = make_scheduler(scheduling_policy=policy, block_size=4, num_blocks=4)
    for i, priority in enumerate(priorities):
        scheduler.add(sequence(str(i), unrelated(i, 4), 4, priority=priority))
    step(scheduler)
    assert "".join(seq.request_id for seq in step(scheduler).preempted)[0] == victims


def test_a_preempting_step_admits_nobody():
    """case-12: although what the victim leaves would hold the one who waits."""
    scheduler = make_scheduler(block_size=4, num_blocks=7)
    first, second, third = (sequence(str(i), unrelated(i, n), 9) for i, n in enumerate((8, 16, 4)))
    for seq in (first, second, third):
        scheduler.add(seq)
    assert lengths(step(scheduler)) == {"0": 8, "1": 16}
    output = step(scheduler)
    assert output.preempted == (second,) and scheduler.blocks.num_free_blocks >= 1
    assert lengths(output) == {"0": 1}
    assert third.status is SequenceStatus.WAITING
    step(scheduler)
    assert third.status is SequenceStatus.WAITING, "nobody overtakes the one that was preempted"
    run(scheduler)
    assert {seq.num_output_tokens for seq in (first, second, third)} == {9}


@pytest.mark.parametrize(
    "num_blocks, budget, peak, preemptions, scheduled",
    [  # records.json, exp_8_3_blocks; 4 requests of 1536 in, 512 out
        pytest.param(910, 512, 512, 0, 8188, id="case-13-2GiB"),
        pytest.param(455, 512, 454, 1, 9993, id="case-13-1GiB"),
        pytest.param(455, 4096, 454, 1, 9996, id="case-13-1GiB-budget-4096"),
    ],
)
def test_the_preemption_of_the_book(num_blocks, budget, peak, preemptions, scheduled):
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_batched_tokens=budget, enable_prefix_caching=False)
    requests = [sequence(str(i), unrelated(i, 1536), 512) for i in range(4)]
    for seq in requests:
        scheduler.add(seq)
    preempted = [seq.request_id for output in run(scheduler) for seq in output.preempted]
    stats = scheduler.stats
    assert (stats.peak_used_blocks, stats.num_preemptions, stats.num_scheduled_tokens) == (peak, preemptions, scheduled)
    assert preempted == ["3"] * preemptions
    assert [seq.num_output_tokens for seq in requests] == [512] * 4


REPLAY_PROMPTS = (210, 316, 670, 884, 1233, 1447, 1796, 2010, 2359, 2573, 2922, 3136)
REPLAY_HITS = (0, 192, 304, 656, 880, 1216, 1440, 1792, 2000, 2352, 2560, 2912)


@pytest.mark.parametrize(
    "num_blocks, pressure, hits",
    [
        pytest.param(2730, 0, REPLAY_HITS, id="case-14-cache6"),
        pytest.param(2730, 3, REPLAY_HITS, id="case-14-pressure6"),
        pytest.param(455, 3, (0,) * 12, id="case-14-pressure1"),
        pytest.param(455, 0, REPLAY_HITS, id="455-blocks-without-pressure"),
    ],
)
def test_the_twelve_rounds_of_the_book(num_blocks, pressure, hits):
    """case-14: each prompt keeps all but the last 4 tokens of the one before; 3 x 4000 unrelated tokens in between.

    Prompt lengths and hits: the book's experiment 8-4, its requests.jsonl and summary.json.
    """
    scheduler = make_scheduler(num_blocks=num_blocks)
    prompt: list[int] = []
    found = []
    for i, length in enumerate(REPLAY_PROMPTS):
        for j in range(pressure if i else 0):
            scheduler.add(sequence("pressure", unrelated(100 + 10 * i + j, 4000), 1))
            run(scheduler)
        kept = prompt[:-4]
        prompt = kept + list(unrelated(i, length - len(kept)))
        seq = sequence("round", prompt, 8)
        scheduler.add(seq)
        run(scheduler)
        found.append(seq.num_cached_tokens)
    assert tuple(found) == hits
    assert sum(REPLAY_PROMPTS) == 19_556 and sum(REPLAY_HITS) == 16_304


@pytest.mark.parametrize(
    "prompt, output, block, branches, shared, own",
    [
        pytest.param(1536, 128, 16, 4, 95, 9, id="case-15"),
        pytest.param(10, 7, 4, 3, 2, 2, id="case-15-small"),
    ],
)
def test_branches_through_the_prefix_cache(prompt, output, block, branches, shared, own):
    """case-15: at most prompt - 1 tokens hit, so the last prompt block is each one's own."""
    scheduler = make_scheduler(block_size=block, max_num_batched_tokens=8192)
    requests = [sequence(str(i), unrelated(0, prompt), output) for i in range(branches)]
    for seq in requests:
        scheduler.add(seq)
    references = 0
    while scheduler.has_unfinished():
        references = max(references, sum(len(seq.block_table) for seq in scheduler.running))
        step(scheduler, lambda seq: int(seq.request_id))
    assert [seq.num_cached_tokens for seq in requests] == [0] + [shared * block] * (branches - 1)
    assert references == branches * (shared + own)
    assert scheduler.stats.peak_used_blocks == shared + branches * own


@pytest.mark.parametrize(
    "prompt, output, block, branches, physical",
    [
        pytest.param(1536, 128, 16, 4, 96 + 4 * 8, id="case-15"),
        pytest.param(10, 7, 4, 3, 2 + 3 * 2, id="shared-tail-is-copied"),
        pytest.param(8, 1, 4, 5, 2, id="one-token-each-needs-no-copy"),
    ],
)
def test_branches_through_a_fork(prompt, output, block, branches, physical):
    """case-15: a fork shares the whole prompt, of which only a started block is copied."""
    scheduler = make_scheduler(block_size=block, max_num_batched_tokens=8192)
    memory = ShadowMemory(scheduler.config.num_blocks, block)
    scheduler.add(sequence("r", unrelated(0, prompt), output, n=branches))
    outputs = run(scheduler, lambda seq: seq.index, memory)
    assert scheduler.stats.peak_used_blocks == physical
    assert len(outputs[0].sampled) == branches and {row for _, row in outputs[0].sampled} == {0}
    assert sorted(seq.index for seq, _ in outputs[0].sampled) == list(range(branches))
    copies = sum(len(output.block_copies) for output in outputs)
    assert copies == (branches - 1 if prompt % block and output > 1 else 0)
    assert scheduler.stats.num_scheduled_tokens == prompt + branches * (output - 1)


@pytest.mark.parametrize("budget, arriving", [(64, 100), (8, 3), (512, 2000)])
def test_arrivals_do_not_starve_decodes(budget, arriving):
    """case-20: whatever arrives, a running decode gets its token in every step."""
    scheduler = make_scheduler(max_num_batched_tokens=budget, num_blocks=4096)
    first = sequence("first", unrelated(0, 5), 40)
    scheduler.add(first)
    step(scheduler)
    for i in range(39):
        scheduler.add(sequence(str(i), unrelated(i + 1, arriving), 4))
        assert lengths(step(scheduler))["first"] == 1
    assert first.status is SequenceStatus.FINISHED_LENGTH


@pytest.mark.parametrize(
    "settings, prompt, fields, error, says",
    [
        pytest.param(
            {"num_blocks": 5}, 97, {"max_tokens": 15}, PoolTooSmall,
            r"7 blocks of 16 tokens \(97 prompt \+ 15 output.*pool has 4.*at most 65 tokens.*8 blocks", id="case-21",
        ),
        pytest.param({"num_blocks": 5, "block_size": 4}, 16, {"max_tokens": 2}, PoolTooSmall, "5 blocks.*has 4",
                     id="case-21-by-one-token"),
        pytest.param({"num_blocks": 5, "block_size": 4, "admission": "reserve"}, 6, {"max_tokens": 7, "n": 2},
                     PoolTooSmall, "5 blocks.*has 4", id="case-21-siblings-reserved"),
        ({}, 0, {}, RequestError, "empty"),
        ({"max_model_len": 20}, 15, {"max_tokens": 7}, RequestError, "15 prompt . 7 output.*20: ask for at most 6"),
        ({"max_model_len": 20}, 21, {"max_tokens": 1}, RequestError, "21 prompt.*shorten the prompt"),
        ({"max_num_seqs": 3}, 5, {"n": 4}, RequestError, "n=4.*max_num_seqs 3"),
    ],
)  # fmt: skip
def test_refusals(settings, prompt, fields, error, says):
    """case-21: with the numbers, at submission, and nothing is queued."""
    scheduler = make_scheduler(**settings)
    with pytest.raises(error, match=says) as caught:
        scheduler.add(sequence("r", unrelated(0, prompt), **fields))
    assert "\n" not in str(caught.value)
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize(
    "settings, prompt, fields",
    [
        pytest.param({"num_blocks": 5, "block_size": 4}, 16, {"max_tokens": 1}, id="case-21-just-fits"),
        pytest.param({"num_blocks": 5, "block_size": 4}, 10, {"max_tokens": 7}, id="case-21-just-fits"),
        pytest.param({"num_blocks": 5, "block_size": 4}, 10, {"max_tokens": 7, "n": 3}, id="siblings-take-turns"),
        pytest.param({"num_blocks": 6, "block_size": 4, "admission": "reserve"}, 6, {"max_tokens": 7, "n": 2},
                     id="siblings-reserved"),
        pytest.param({"max_model_len": 20, "block_size": 4}, 14, {"max_tokens": 7}, id="the-last-token-is-never-fed"),
    ],
)  # fmt: skip
def test_what_just_fits_is_served(settings, prompt, fields):
    scheduler = make_scheduler(**settings)
    memory = ShadowMemory(scheduler.config.num_blocks, scheduler.config.block_size)
    scheduler.add(sequence("r", unrelated(0, prompt), **fields))
    outputs = run(scheduler, lambda seq: seq.index, memory)
    drawn = {seq.index: seq.num_output_tokens for output in outputs for seq, _ in output.sampled}
    assert drawn == dict.fromkeys(range(fields.get("n", 1)), fields["max_tokens"])


def test_the_advice_of_a_refusal_works():
    """case-21: as many blocks as the message says, or as few tokens, and it is served."""
    with pytest.raises(PoolTooSmall) as caught:
        make_scheduler(num_blocks=5).add(sequence("r", unrelated(0, 97), 15))
    tokens, blocks = (int(x) for x in re.findall(r"at most (\d+) tokens.*pool (\d+) blocks", str(caught.value))[0])
    for num_blocks, prompt, output in ((blocks, 97, 15), (5, 50, tokens - 50), (5, 1, tokens - 1)):
        scheduler = make_scheduler(num_blocks=num_blocks)
        scheduler.add(sequence("r", unrelated(0, prompt), output))
        run(scheduler)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [48, 53, 16, 5])
def test_identical_prompts_in_one_batch(length, caching):
    """case-22: they may share blocks at once, and no table names a free block."""
    scheduler = make_scheduler(enable_prefix_caching=caching, num_blocks=20)
    memory = ShadowMemory(20, 16)
    for i in range(3):
        scheduler.add(sequence(str(i), unrelated(0, length), 12))
    output = scheduler.schedule()
    memory.forward(output)
    scheduler.update(output, [0] * 3)
    hit = (length - 1) // 16 * 16 if caching else 0
    assert list(lengths(output).values()) == [length, length - hit, length - hit]
    assert not {i for seq in scheduler.running for i in seq.block_table} & set(free_queue(scheduler))
    run(scheduler, lambda seq: int(seq.request_id) % 2, memory)


@pytest.mark.parametrize("blocks, size", [(1, 16), (3, 16), (5, 4), (4, 1)])
def test_a_full_hit_computes_the_last_token(blocks, size):
    """case-23: of the last block only whole blocks are left out, so one block is computed again."""
    scheduler = make_scheduler(block_size=size)
    for _ in range(2):
        seq = sequence("r", unrelated(0, blocks * size), 3)
        scheduler.add(seq)
        output = step(scheduler)
        run(scheduler)
    assert lengths(output) == {"r": size} and output.scheduled[0].start == (blocks - 1) * size
    assert len(output.sampled) == 1
    assert seq.num_cached_tokens == (blocks - 1) * size


def test_resumed_with_a_prefix_hit():
    """case-24: the second request loses its blocks, finds part of them again, and every counter agrees."""
    scheduler = make_scheduler(block_size=4, num_blocks=8)
    memory = ShadowMemory(8, 4)
    first, second = sequence("0", unrelated(0, 8), 12), sequence("1", unrelated(1, 14), 8)
    scheduler.add(first)
    scheduler.add(second)
    outputs = run(scheduler, lambda seq: 7, memory)
    starts = [item.start for output in outputs for item in output.scheduled if item.seq is second]
    restart = next(i for i in range(1, len(starts)) if starts[i] <= starts[i - 1])
    assert starts[restart] > 0 and starts[restart] % 4 == 0, "what is left of its prefix is not computed again"
    assert second.num_preemptions == scheduler.stats.num_preemptions == 1
    assert (first.num_output_tokens, second.num_output_tokens) == (12, 8)
    assert second.num_cached_tokens == 0, "the hit of a resumed request is not the client's"
    assert scheduler.stats.prefix_hit_tokens == starts[restart]
    computed = sum(output.num_tokens for output in outputs)
    assert scheduler.stats.num_scheduled_tokens == computed
    assert computed > (8 + 12 - 1) + (14 + 8 - 1)
