"""The host tier of an engine: how large it is, and what a fetch and what computing anew take on this very machine.

Both speeds are measured when the engine starts, unless they are given: a data sheet's link does not know of many small
copies, nor its peak of this model's kernels. One prefill, and copies both ways, the second of two tries.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mini_engine.analysis import forward_flops
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.eviction import make_policy
from mini_engine.host_tier import HostTier
from mini_engine.prefix_tier import PrefixTier
from mini_engine.runner import ModelRunner
from mini_engine.scheduler_output import ScheduledSequence, SchedulerOutput
from mini_engine.sequence import Sequence
from mini_engine.transfer import TransferLink

MEASURED_TOKENS = {"cpu": 64, "cuda": 2048}  # a GPU reaches its speed only with many
MEASURED_BLOCKS = 64


def open_prefix_tier(
    config: EngineConfig, model: ModelConfig, runner: ModelRunner, clock: Callable[[], float]
) -> PrefixTier:
    """The tier that `config.host_cache_bytes` asks for, with slots in the runner's host memory.

    Nothing may be in the KV pool yet: measuring overwrites it.
    """
    block_bytes = runner.kv.bytes_per_token * config.block_size
    link_rate = config.host_link_bytes_per_s or _measure_link(runner)
    compute_rate = config.prefill_flops_per_s or _measure_prefill(config, model, runner)

    def recompute_s(new: int, history: int) -> float:
        return forward_flops(model, new, history, logit_rows=0) / compute_rate

    host = HostTier(
        runner.num_cache_slots * block_bytes,
        block_bytes,
        config.block_size,
        TransferLink(link_rate),
        recompute_s,
        config.host_cache_admission,
        make_policy(config.eviction_policy, runner.num_cache_slots),
    )
    return PrefixTier(host, clock, first_slot=runner.num_host_blocks)


def _measure_prefill(config: EngineConfig, model: ModelConfig, runner: ModelRunner) -> float:
    """FLOP/s of one prompt."""
    room = min(runner.max_model_len, config.max_num_batched_tokens, (runner.num_blocks - 1) * config.block_size)
    num_tokens = min(MEASURED_TOKENS[runner.device.type], room)
    seq = Sequence("measured", [0] * num_tokens)
    seq.block_table = list(range(1, 1 + -(-num_tokens // runner.block_size)))
    output = SchedulerOutput((ScheduledSequence(seq, 0, num_tokens),), ((seq, 0),), (), ())
    seconds = _second_try(lambda: runner.execute(output), runner.device)
    return forward_flops(model, num_tokens) / seconds


def _measure_link(runner: ModelRunner) -> float:
    """Bytes a second of blocks that go out and come back."""
    num_blocks = min(MEASURED_BLOCKS, runner.num_blocks - 1, runner.num_cache_slots)
    pairs = tuple((1 + i, runner.num_host_blocks + i) for i in range(num_blocks))
    output = SchedulerOutput((), (), (), (), swap_out=pairs, swap_in=tuple((slot, block) for block, slot in pairs))
    seconds = _second_try(lambda: runner.swap(output), runner.device)
    return 2 * num_blocks * runner.kv.bytes_per_token * runner.block_size / seconds


def _second_try(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of doing it again: the first time compiles kernels and touches memory."""
    for _ in range(2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - start
