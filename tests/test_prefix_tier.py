"""The host tier of a scheduler: what is copied out, what comes back, what is computed, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mini_engine.decisions import Decision, write_json_lines
from mini_engine.host_tier import Fault, HostTier
from mini_engine.prefix_tier import PrefixTier
from mini_engine.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from mini_engine.transfer import TransferLink
from tests.scheduling import ShadowMemory, lengths, run, sequence, step, unrelated

FAST = TransferLink(1e9)
SIZE = 4
ADMITTED = ("admit", "write", "admitted")
FETCHED = ("fetch", "fetch", "saves time")


class Run:
    """A scheduler with a pool of six blocks and a tier, and a memory that knows what lies where. A second passes with
    every look at the clock."""

    def __init__(self, slots: int = 8, link: TransferLink = FAST, chunk: int = 0, **settings: Any):
        host = HostTier(slots, 1, SIZE, link, lambda new, history: float(new), **settings)
        self.now, self.pace = 0.0, 1.0
        config = SchedulerConfig(block_size=SIZE, num_blocks=7, long_prefill_token_threshold=chunk)
        self.scheduler = Scheduler(config, tier=PrefixTier(host, self._clock))
        self.host, self.stats = host, self.scheduler.stats
        self.memory = ShadowMemory(7, SIZE, slots)

    def _clock(self) -> float:
        self.now += self.pace
        return self.now

    def serve(self, name: str, prompt: Any, max_tokens: int = 1, **fields: Any) -> list[SchedulerOutput]:
        """One request to its end; the steps it took."""
        self.seq = sequence(name, prompt, max_tokens, **fields)
        self.scheduler.add(self.seq)
        return run(self.scheduler, memory=self.memory)


def test_what_the_pool_gives_up_comes_back() -> None:
    """A takes blocks 1 to 5, of which four are full. B needs all six, so A's four are copied out first; A's return
    pushes four of B's five out in turn, and gets its own back before anything is computed."""
    served = Run(slots=16)
    served.serve("A", unrelated(0, 18))
    out = served.serve("B", unrelated(1, 23))[0]
    assert [block for block, _ in out.swap_out] == [4, 3, 2, 1] and out.swap_in == ()
    back = served.serve("A again", unrelated(0, 18))[0]
    slot_of = dict(out.swap_out)
    assert [slot for slot, _ in back.swap_in] == [slot_of[block] for block in (1, 2, 3, 4)]
    assert len(back.swap_out) == 4 and not {slot for _, slot in back.swap_out} & set(slot_of.values())
    assert lengths(back) == {"A again": 2} and back.scheduled[0].start == 16
    assert served.seq.num_cached_tokens == 16
    assert (served.stats.prefix_hit_tokens, served.stats.host_hit_tokens) == (0, 16)
    assert served.host.counts[FETCHED] == 1
    assert served.serve("A still", unrelated(0, 18))[0].swap_in == (), "fetched blocks are findable in the pool"
    assert served.stats.prefix_hit_tokens == 16


def test_only_what_lies_behind_the_pools_part_is_fetched() -> None:
    """B takes one blank block and three of A's, the last ones: the pool keeps the first."""
    served = Run()
    served.serve("A", unrelated(0, 18))
    served.serve("B", unrelated(1, 17))
    back = served.serve("A again", unrelated(0, 18))[0]
    assert (served.stats.prefix_hit_tokens, served.stats.host_hit_tokens) == (4, 12)
    assert len(back.swap_in) == 3 and lengths(back) == {"A again": 2}


def test_a_step_writes_no_slot_that_it_reads() -> None:
    """The host is full, and the blocks that A returns to push others out: those find no slot, though by the clock the
    fetch is over."""
    served = Run(slots=4, link=TransferLink(1e6))
    served.serve("A", unrelated(0, 18))
    served.serve("B", unrelated(1, 23))
    back = served.serve("A again", unrelated(0, 18))[0]
    assert len(back.swap_in) == 4 and back.swap_out == ()
    assert served.host.counts["admit", "drop", "host full"] == 4
    served.serve("B again", unrelated(1, 23))
    assert served.host.pool.num_free == 4


def test_a_fetch_that_is_no_faster_is_refused_and_counted() -> None:
    served = Run(link=TransferLink(0.25))  # four seconds a block, as long as its four tokens take
    served.serve("A", unrelated(0, 18))
    served.serve("B", unrelated(1, 23))
    served.now += 100
    back = served.serve("A again", unrelated(0, 18))[0]
    assert back.swap_in == () and lengths(back) == {"A again": 18}
    assert served.host.counts["fetch", "recompute", "no faster than recompute"] == 1
    assert served.stats.host_hit_tokens == served.seq.num_cached_tokens == 0


@pytest.mark.parametrize("fault, reason", [(Fault(fails=True), "failed"), (Fault(slowdown=1e12), "too slow")])
def test_a_fetch_that_comes_to_nothing(fault: Fault, reason: str) -> None:
    served = Run(faults=lambda: fault)
    served.serve("A", unrelated(0, 18))
    served.serve("B", unrelated(1, 23))
    back = served.serve("A again", unrelated(0, 18))[0]
    assert back.swap_in == () and lengths(back) == {"A again": 18}
    assert served.host.counts["fetch", "recompute", reason] == 1


def test_nothing_is_found_before_it_has_landed() -> None:
    """The clock stands still: what is on its way out cannot be fetched, and is computed."""
    served = Run()
    served.pace = 0.0
    served.serve("A", unrelated(0, 18))
    served.serve("B", unrelated(1, 23))
    assert served.serve("A again", unrelated(0, 18))[0].swap_in == ()
    served.now = 1.0
    served.serve("B again", unrelated(1, 23))
    assert (served.stats.prefix_hit_tokens, served.stats.host_hit_tokens) == (4, 16)


def test_another_salt_finds_nothing_on_the_host() -> None:
    served = Run(slots=16)
    served.serve("A", unrelated(0, 18), cache_salt="mine")
    served.serve("B", unrelated(1, 23))
    assert served.serve("A of another", unrelated(0, 18), cache_salt="theirs")[0].swap_in == ()
    served.serve("B", unrelated(1, 23))
    assert len(served.serve("A again", unrelated(0, 18), cache_salt="mine")[0].swap_in) == 4


def test_a_preempted_sequence_fetches_what_it_lost() -> None:
    """B is preempted for A's growth, and its blocks are given out. Its first two come back from the host, and the
    answer it was given earlier, how much of its prompt was cached, stays."""
    served = Run(slots=16)
    first, second = sequence("A", unrelated(0, 11), 12), sequence("B", unrelated(1, 11), 12)
    served.scheduler.add(first)
    served.scheduler.add(second)
    outputs = run(served.scheduler, memory=served.memory)
    assert served.stats.num_preemptions == 1 and first.num_output_tokens == second.num_output_tokens == 12
    back = [output for output in outputs if output.swap_in]
    assert len(back) == 1 and back[0].scheduled[0].seq is second
    assert second.num_cached_tokens == 0 < served.stats.host_hit_tokens


def test_a_failed_step_is_not_trusted_to_have_copied() -> None:
    served = Run(slots=16)
    served.serve("A", unrelated(0, 18))
    served.scheduler.add(sequence("B", unrelated(1, 23), 1))
    output = served.scheduler.schedule()
    assert len(output.swap_out) == 4
    served.memory.fail(output)
    served.scheduler.undo(output)
    served.scheduler.check()
    assert served.host.used_bytes == 0
    run(served.scheduler, memory=served.memory)
    assert served.serve("A again", unrelated(0, 18))[0].swap_in == ()


def test_reset_empties_the_host_too() -> None:
    served = Run(slots=16)
    served.serve("A", unrelated(0, 18))
    served.serve("B", unrelated(1, 23))
    served.scheduler.add(sequence("C", unrelated(2, 7), 2))
    step(served.scheduler)
    assert not served.scheduler.reset_prefix_cache() and served.host.used_bytes == 5, "C took one of B's"
    run(served.scheduler)
    assert served.scheduler.reset_prefix_cache() and served.host.used_bytes == 0
    served.scheduler.check()
    assert served.serve("A again", unrelated(0, 18))[0].swap_in == ()


def test_a_chunked_prompt_goes_on_behind_what_was_fetched() -> None:
    served = Run(slots=16, chunk=1)
    for name, prompt in (("A", unrelated(0, 19)), ("B", unrelated(1, 23)), ("A again", unrelated(0, 19))):
        outputs = served.serve(name, prompt)
    assert [(item.start, item.num_tokens) for output in outputs for item in output.scheduled] == [
        (16, 1),
        (17, 1),
        (18, 1),
    ]


def test_decisions_are_logged_with_their_numbers(tmp_path: Path) -> None:
    served, log = Run(slots=16), list[Decision]()
    served.host.log = log.append
    for name, prompt in (("A", unrelated(0, 18)), ("B", unrelated(1, 23)), ("A again", unrelated(0, 18))):
        served.serve(name, prompt)
    write_json_lines(log, tmp_path / "decisions.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert len(lines) == served.host.counts.total() == 4 + 1 + 4
    fetch = next(line for line in lines if line["what"] == "fetch")
    assert (fetch["num_bytes"], fetch["recompute_s"], fetch["fetch_s"], fetch["choice"]) == (4, 16.0, 4e-9, "fetch")
    assert fetch["value_s"] == fetch["recompute_s"] - fetch["fetch_s"]
