"""The runs of lab 10-1: one set of requests under several ways to cut the KV, looked into, counted and timed.

find_tokens(alone, ranks, prompt)     which rank's pool holds which token, found by its key
exchanges(llm, prompts)               the collectives of one decode step; ranks are threads of this process
time_decode(llm, prompts, output)     seconds of a decode step; ranks may be processes
most_running(llm, prompts, output)    how many requests run at once in the pool there is
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mini_engine import SamplingParams
from mini_engine.analysis.dcp_shapes import AttentionShape
from mini_engine.config import SchedulerConfig
from mini_engine.dcp import CommBackend
from mini_engine.groups import Collective
from mini_engine.model_config import ModelConfig
from mini_engine.scheduler import Scheduler
from mini_engine.sequence import Sequence as EngineSequence

if TYPE_CHECKING:
    from mini_engine import LLM, LLMEngine
    from mini_engine.executor import LocalRunner

ENOUGH = 100  # tokens: nobody is to end before everybody decodes
SAME_KEY = 1e-3  # two keys nearer than this are one; those of different tokens are some units apart


class Cut(NamedTuple):
    """A way to cut the context: decode_context_parallel_size and how its ranks exchange."""

    dcp: int = 1
    comm_backend: CommBackend = "ag_rs"
    q_replicate: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As `LLM` takes them."""
        return {
            "decode_context_parallel_size": self.dcp,
            "dcp_comm_backend": self.comm_backend,
            "dcp_q_replicate": self.q_replicate,
        }

    @property
    def title(self) -> str:
        if self.dcp == 1:
            return "TP alone"
        return f"dcp {self.dcp}, {self.comm_backend}{', q replicated' * self.q_replicate}"


def cuts(*sizes: int) -> list[Cut]:
    """Size 1 once, any other with each exchange, without and with a replicated query projection."""
    found = []
    for size in sizes:
        ways = [(comm, replicate) for comm in ("ag_rs", "a2a") for replicate in (False, True)]
        found += [Cut(size, comm, replicate) for comm, replicate in (ways if size > 1 else ways[:1])]  # type: ignore[arg-type]
    return found


def shape_of(model: ModelConfig) -> AttentionShape:
    """A model that the engine has loaded, as the analysis sees it."""
    return AttentionShape(
        model.architecture,
        model.num_hidden_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.cached_heads,
        model.cached_key_dim,
        model.cached_value_dim or model.cached_value_view,
        model.cached_heads * (model.cached_key_dim + model.cached_value_dim),
    )


def find_tokens(alone: LLM, ranks: LLM, prompt: Sequence[int]) -> list[tuple[int, list[int]]]:
    """For each rank a KV head and the positions of `prompt` whose keys of that head lie in its pool.

    No rule of ownership is asked: each key that one process computes alone is looked for among all that a rank stored.
    ranks: with distributed_executor_backend "local" and at least as many ranks as KV heads, so that each has one head.
    """
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    keys = _keys_in_order(alone.engine, prompt, params)
    ranks.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
    held = []
    for runner in ranks.engine.runner.ranks:
        stored = runner.kv.layers[0][0].flatten(0, 1)[:, 0]
        near = [_nearest(keys[:, head], stored) < SAME_KEY for head in range(keys.shape[1])]
        head = max(range(len(near)), key=lambda index: int(near[index].sum()))
        held.append((head, near[head].nonzero().flatten().tolist()))
    return held


def _nearest(keys: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """The distance of each key [L, D] from the nearest that is stored [slots, D]. As differences: through a matrix
    product, the distance of equal keys would not come out as 0."""
    return torch.cdist(keys, stored, compute_mode="donot_use_mm_for_euclid_dist").amin(1)


def _keys_in_order(engine: LLMEngine, prompt: Sequence[int], params: SamplingParams) -> torch.Tensor:
    """Keys of layer 0, [tokens, kv heads, D], as a process alone has them after its first step."""
    engine.add_request("keys", {"prompt_token_ids": list(prompt)}, params)
    engine.step()
    table = engine.scheduler.running[0].block_table
    keys = engine.runner.kv.layers[0][0][torch.tensor([int(block) for block in table])].flatten(0, 1)[: len(prompt)]
    engine.abort("keys")
    return keys


class Exchanged(NamedTuple):
    """The collectives of one decode step on rank 0: between ranks of its context group, and of all of its TP group."""

    context: list[Collective]
    tensor: list[Collective]

    @property
    def context_bytes(self) -> int:
        return sum(record.num_bytes for record in self.context)

    @property
    def tensor_bytes(self) -> int:
        return sum(record.num_bytes for record in self.tensor)


def exchanges(llm: LLM, prompts: Sequence[Sequence[int]]) -> Exchanged:
    """Of the first step in which all `prompts` decode. llm: with distributed_executor_backend "local"."""
    runner: LocalRunner = llm.engine.runner
    first = runner.ranks[0]
    _start(llm.engine, prompts, output=ENOUGH)
    for group in (first.context_group, first.group):
        group.records.clear()
    llm.engine.step()
    _drop(llm.engine)
    cut = first.context_group.size > 1
    return Exchanged(list(first.context_group.records) if cut else [], list(first.group.records))


class Timed(NamedTuple):
    """step_s: seconds of the fastest decode step of all requests, since on a busy machine a median tells of the others.
    tokens: what each request got."""

    step_s: float
    tokens_per_s: float
    tokens: list[list[int]]


def time_decode(llm: LLM, prompts: Sequence[Sequence[int]], output: int) -> Timed:
    """Serve the prompts together; only steps in which all of them decode count.

    Raises ValueError where there is none: the first to start had ended when the last one began.
    """
    records = _start(llm.engine, prompts, output)
    times = []
    while llm.engine.has_unfinished_requests():
        together = len(llm.engine.scheduler.running) == len(prompts)
        start = time.perf_counter()
        llm.engine.step()
        if together:
            times.append(time.perf_counter() - start)
    if not times:
        raise ValueError(f"{output} tokens are too few for {len(prompts)} requests to decode together: ask for more")
    step_s = min(times)
    return Timed(step_s, len(prompts) / step_s, [list(record.outputs[0].token_ids) for record in records])


def _start(engine: LLMEngine, prompts: Sequence[Sequence[int]], output: int) -> list[Any]:
    """Add the prompts, and step until each has a token."""
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    records = [engine.add_request(f"r{i}", {"prompt_token_ids": list(ids)}, params) for i, ids in enumerate(prompts)]
    while not all(record.outputs[0].token_ids for record in records):
        engine.step()
    return records


def _drop(engine: LLMEngine) -> None:
    for request_id in list(engine.requests):
        engine.abort(request_id)


def most_running(llm: LLM, prompts: Sequence[Sequence[int]], output: int) -> int:
    """How many requests have KV at a time, of all that were asked for at once. Looks until the first of them ends: by
    then everyone has been admitted who fits, if a step may compute as many prompts."""
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for i, ids in enumerate(prompts):
        llm.engine.add_request(f"r{i}", {"prompt_token_ids": list(ids)}, params)
    most = _watch(llm.engine.scheduler, llm.engine.step)
    _drop(llm.engine)
    return most


def most_running_without_model(config: SchedulerConfig, requests: int, prompt: int, output: int) -> int:
    """The same by the scheduler alone, which asks no model: for pools that are not here."""
    scheduler = Scheduler(config)
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    for i in range(requests):
        scheduler.add(EngineSequence(f"r{i}", [0] * prompt, params))

    def step() -> None:
        decided = scheduler.schedule()
        scheduler.update(decided, [0] * len(decided.sampled))

    return _watch(scheduler, step)


def _watch(scheduler: Scheduler, step: Callable[[], Any]) -> int:
    """Step until fewer are running than before."""
    most = 0
    while scheduler.has_unfinished():
        step()
        if len(scheduler.running) < most:
            break
        most = len(scheduler.running)
    return most
