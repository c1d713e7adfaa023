"""Greedy tokens of an engine whose contexts are cut over ranks are those of an engine alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mini_engine import LLM, SamplingParams, dcp, ops
from mini_engine import context_parallel as layers
from mini_engine.analysis.dcp import exchange_bytes, exchange_collectives
from mini_engine.attention import AttentionState
from mini_engine.context_shard import NO_SLOT, ContextShard
from mini_engine.groups import Group
from tests.builders import tiny_deepseek_v2_dir, tiny_llama_dir, tiny_qwen3_dir
from tests.test_switches import watch_blocks

SHARED = list(range(40, 78))
# Shorter than N, around blocks of 4 and virtual blocks of 8 and 16, over several chunks, and with a common beginning.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33)
PROMPTS = [[*range(10 + n, 10 + 2 * n)] for n in LENGTHS] + [[*SHARED, 5, 6, 7], [*SHARED, 9], [*SHARED, 5, 6, 7]]
MAX_TOKENS = 10
Answers = list[list[int]]


@pytest.fixture(scope="module", autouse=True)
def one_thread_a_rank() -> Iterator[None]:
    """Ranks are threads here: more threads within each would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One KV head, two, and a latent; eight query heads."""
    directory = tmp_path_factory.mktemp("models")
    return {
        "llama": tiny_llama_dir(directory, num_attention_heads=8, num_key_value_heads=1),
        "qwen3": tiny_qwen3_dir(directory, num_attention_heads=8, num_key_value_heads=2),
        "deepseek": tiny_deepseek_v2_dir(directory, num_attention_heads=8),
    }


def make(model: Path, size: int = 1, dcp_size: int = 1, **options: Any) -> LLM:
    llm = LLM(
        str(model),
        **{
            "dtype": "float32", "block_size": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 200,
            "tensor_parallel_size": size, "decode_context_parallel_size": dcp_size,
            "distributed_executor_backend": "local", **options,
        },
    )  # fmt: skip
    watch_blocks(llm)
    return llm


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS, **params: Any) -> Answers:
    params = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **params}
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(**params))
    assert llm.engine.scheduler.blocks.num_free_blocks == llm.engine.runner.num_blocks - 1
    return [each.token_ids for output in outputs for each in output.outputs]


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> Callable[[str], Answers]:
    """Of one rank, one request at a time, whole prompts, no sharing."""
    known: dict[str, Answers] = {}

    def of(name: str) -> Answers:
        if name not in known:
            llm = make(models[name], max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=256)
            known[name] = answers(llm)
        return known[name]

    return of


SIZES = {
    "llama": [(2, 1), (2, 2), (4, 2), (4, 4), (8, 8)],
    "qwen3": [(2, 1), (4, 1), (4, 2), (8, 4)],
    "deepseek": [(2, 1), (2, 2), (4, 2), (4, 4), (8, 8)],
}


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, sizes in SIZES.items() for size, n in sizes if n == 1]
)
def test_tensor_parallel_tokens(models, alone, name: str, size: int) -> None:
    assert answers(make(models[name], size)) == alone(name)


# All four exchanges, on 8 ranks two of them: threads that hand over to one another take their time.
EXCHANGES = [("ag_rs", False), ("a2a", True), ("ag_rs", True), ("a2a", False)]
CUTS = [
    (name, size, n, *exchange)
    for name, sizes in SIZES.items()
    for size, n in sizes
    if n > 1
    for exchange in EXCHANGES[: 2 if size == 8 else 4]
]


@pytest.mark.parametrize(("name", "size", "n", "comm_backend", "q_replicate"), CUTS)
def test_each_exchange_gives_the_same_tokens(
    models, alone, name: str, size: int, n: int, comm_backend: str, q_replicate: bool
) -> None:
    """Mixed batches too: prompts of 33 tokens are cut by a budget of 24 beside others' decodes."""
    llm = make(models[name], size, n, dcp_comm_backend=comm_backend, dcp_q_replicate=q_replicate)
    assert answers(llm) == alone(name)
    assert answers(llm) == alone(name), "after prefix hits of whole virtual blocks"
    assert llm.engine.scheduler.stats.prefix_hit_tokens % (4 * n) == 0
    assert llm.engine.scheduler.stats.prefix_hit_tokens > 0


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek"])
@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_tight_pool_with_forks(models, alone, name: str, interleave: int, mode: str) -> None:
    """Preempted requests lose their blocks on all ranks at once; siblings copy the tail they write to."""
    options: dict[str, Any] = {"preemption_mode": mode, "swap_space_bytes": 1 << 20} if mode == "swap" else {}
    llm = make(models[name], 4, 2, cp_kv_cache_interleave_size=interleave, num_gpu_blocks_override=14, **options)
    found = answers(llm, n=3, temperature=1.0, top_k=1)
    assert found == [tokens for tokens in alone(name) for _ in range(3)]
    stats = llm.engine.scheduler.stats
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_in_blocks > 0) == (mode == "swap")


@pytest.mark.parametrize("name", ["llama", "deepseek"])
@pytest.mark.parametrize("budget", [1, 7, 256])
def test_chunks_of_any_length(models, alone, name: str, budget: int) -> None:
    """One token a step, chunks across virtual blocks, and whole prompts."""
    assert answers(make(models[name], 2, 2, max_num_batched_tokens=budget)) == alone(name)


@pytest.mark.parametrize("name", ["llama", "deepseek"])
@pytest.mark.parametrize("by_context", [True, False])
def test_both_ways_of_a_chunk(models, alone, monkeypatch, name: str, by_context: bool) -> None:
    """Whether a chunk's queries travel or its context, the tokens are the same: here always the one, then the other."""
    monkeypatch.setattr(layers.ContextParallelLayers, "_context_travels", staticmethod(lambda *sizes: by_context))
    assert answers(make(models[name], 4, 4, max_num_batched_tokens=7)) == alone(name)


def test_smollm2_with_padded_heads() -> None:
    """9 query heads and 3 of zeros: the real model on 6 ranks of 2 heads and on 12 of one."""
    prompts = ["The capital of France is", "def fib(n):\n    ", "Xin chào, tôi là"]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24}

    def tokens(**options: Any) -> Answers:
        return [o.outputs[0].token_ids for o in LLM(**common, **options).generate(prompts, params)]

    expected = tokens()
    for size, n in [(6, 2), (12, 4)]:
        options = {"tensor_parallel_size": size, "decode_context_parallel_size": n, "num_padded_query_heads": 12}
        assert tokens(**options, distributed_executor_backend="local") == expected


# What crosses the wire


@pytest.mark.parametrize("q_replicate", [False, True])
@pytest.mark.parametrize("comm_backend", ["ag_rs", "a2a"])
@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_bytes_of_a_decode_step_are_the_formula(models, name: str, comm_backend: str, q_replicate: bool) -> None:
    llm = make(models[name], 4, 2, dcp_comm_backend=comm_backend, dcp_q_replicate=q_replicate)
    group = one_decode_step(llm)
    config = llm.engine.model_config
    key_dim, value_dim = config.cached_key_dim, config.cached_value_view or config.cached_value_dim
    expected = exchange_bytes(comm_backend, q_replicate, 2, 3, 4, key_dim, value_dim, 4)
    layers_count = config.num_hidden_layers
    assert sum(record.num_bytes for record in group.records) == layers_count * expected
    assert len(group.records) == layers_count * exchange_collectives(comm_backend, q_replicate)


def test_results_travel_in_the_models_dtype(models) -> None:
    """In bfloat16 queries and results are half the bytes of float32, and the lse is what it was."""
    group = one_decode_step(make(models["llama"], 4, 2, dtype="bfloat16"))
    assert sum(record.num_bytes for record in group.records) == 2 * exchange_bytes("ag_rs", False, 2, 3, 4, 16, 16, 2)


def one_decode_step(llm: LLM) -> Group:
    """The first rank's context group after a step of three decodes, with the records of that step."""
    for i, prompt in enumerate(PROMPTS[-3:]):
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        llm.engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    for _ in range(10):
        llm.engine.step()  # all are decoding
    group = llm.engine.runner.ranks[0].context_group  # type: ignore[attr-defined]
    group.records.clear()
    llm.engine.step()
    return group


def test_a_prompt_without_context_exchanges_nothing(models) -> None:
    llm = make(models["llama"], 4, 4, max_num_batched_tokens=64)
    answers(llm, [list(range(20, 60))], max_tokens=1)
    assert not llm.engine.runner.ranks[0].context_group.records  # type: ignore[attr-defined]


# Llama of one KV head of 16 on 4 ranks of a group: a context token is 2 * 16 * 4 = 128 bytes a layer. A new token sends
# 8 heads of 16 as query, gets 8 of 16 and 8 lse back: 512 + 512 + 32 bytes, without queries 544. So 8.25 context tokens
# weigh as much as a new one, 4.25 where queries are replicated.
@pytest.mark.parametrize(
    ("new", "context", "q_replicate", "context_travels"),
    [
        (4, 32, False, True), (4, 33, False, False), (4, 34, False, False), (4, 16, True, True), (4, 18, True, False),
        (8, 65, False, True), (8, 67, False, False), (1, 8, False, False), (1, 1, False, False), (2, 16, False, True),
    ],
)  # fmt: skip
def test_the_lighter_of_two_travels(models, new: int, context: int, q_replicate: bool, context_travels: bool) -> None:
    """A chunk of `new` tokens after `context`: the group's bytes are those of the context or those of the queries."""
    llm = make(models["llama"], 4, 4, dcp_q_replicate=q_replicate, max_num_batched_tokens=context, block_size=1)
    llm.engine.add_request("a", {"prompt_token_ids": [9] * context + list(range(20, 20 + new))}, SamplingParams())
    llm.engine.step()
    rank = llm.engine.runner.ranks[0]  # type: ignore[attr-defined]
    rank.context_group.records.clear()
    llm.engine.step()
    names = [record.name for record in rank.context_group.records]
    total = sum(record.num_bytes for record in rank.context_group.records)
    if context_travels:
        assert names == ["all_gather"] * 4, "K and V of two layers"
        assert total == 2 * 3 * -(-context // 4) * 128
    else:
        assert total == 2 * exchange_bytes("ag_rs", q_replicate, 4, min(new, context), 8, 16, 16, 4)


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_a_narrow_cache_is_read_as_it_is_stored(models, name: str) -> None:
    """New tokens meet K and V rounded, as they would from the cache: tokens do not depend on chunks or ranks."""
    options: dict[str, Any] = {"kv_cache_dtype": "bfloat16"}
    expected = answers(make(models[name], max_num_seqs=1, max_num_batched_tokens=256, **options))
    for budget in (3, 24):
        assert answers(make(models[name], 4, 4, max_num_batched_tokens=budget, **options)) == expected


def test_a_pool_of_as_many_bytes_holds_n_times_the_requests(models) -> None:
    """The memory truth: at a fixed budget a rank, requests that run at once grow by N, and bytes a token fall by N."""
    budget, length = 1 << 17, 60
    most, held = {}, {}
    for n in (1, 2, 4):
        llm = make(
            models["llama"], 4, n, num_gpu_blocks_override=None, kv_cache_memory_bytes=budget,
            enable_prefix_caching=False, max_num_batched_tokens=4096, max_model_len=128,
        )  # fmt: skip
        for i in range(120):
            params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            llm.engine.add_request(str(i), {"prompt_token_ids": [(i + j) % 300 for j in range(length)]}, params)
        llm.engine.step()
        most[n] = len(llm.engine.scheduler.running)
        rank = llm.engine.runner.ranks[0]  # type: ignore[attr-defined]
        assert budget - rank.kv.bytes_per_token * 4 < rank.kv.nbytes <= budget
        held[n] = rank.kv.bytes_per_token / n
    blocks = budget // (4 * int(held[1])) - 1
    assert most == {n: blocks // -(-length // (4 * n)) for n in (1, 2, 4)}
    assert held[1] == 2 * held[2] == 4 * held[4]
    assert most[4] >= 3.5 * most[1]


# What the tests above would catch: each change is seen in the tokens


def lse_in_base_2(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ops.context_attention

    def changed(*args: Any) -> AttentionState:
        out, lse = original(*args)
        return AttentionState(out, lse / 0.6931471805599453)

    monkeypatch.setattr(ops, "context_attention", changed)


def an_empty_shard_has_lse_0(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ops.context_attention

    def changed(*args: Any) -> AttentionState:
        out, lse = original(*args)
        return AttentionState(out, lse.masked_fill(torch.isneginf(lse), 0.0))

    monkeypatch.setattr(ops, "context_attention", changed)


def mean_in_place_of_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dcp.merge_weights

    def changed(lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares, total = original(lses)
        return torch.full_like(shares, 1 / len(shares)), total

    monkeypatch.setattr(dcp, "merge_weights", changed)


def owner_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ContextShard.local_slots

    def changed(self: ContextShard, slots: np.ndarray, block_size: int) -> np.ndarray:
        return original(ContextShard((self.rank + 1) % self.size, self.size, self.interleave), slots, block_size)

    monkeypatch.setattr(ContextShard, "local_slots", changed)


def slot_not_localised(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ContextShard.local_slots

    def changed(self: ContextShard, slots: np.ndarray, block_size: int) -> np.ndarray:
        ids, offset = np.divmod(slots, self.virtual_block_size(block_size))
        return np.where(original(self, slots, block_size) == NO_SLOT, NO_SLOT, ids * block_size + offset % block_size)

    monkeypatch.setattr(ContextShard, "local_slots", changed)


def new_tokens_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "merge", lambda seen, new: seen)


def local_length_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ContextShard.local_length

    def changed(self: ContextShard, length: int) -> int:
        return original(ContextShard(0, self.size, self.interleave), length)

    monkeypatch.setattr(ContextShard, "local_length", changed)


MUTATIONS = [
    lse_in_base_2, an_empty_shard_has_lse_0, mean_in_place_of_merge, owner_off_by_one, slot_not_localised,
    new_tokens_forgotten, local_length_of_another_rank,
]  # fmt: skip


@pytest.mark.parametrize(("name", "mutation"), list(itertools.product(["llama", "deepseek"], MUTATIONS)))
def test_a_mistake_changes_tokens(models, alone, monkeypatch, name: str, mutation: Callable[..., None]) -> None:
    mutation(monkeypatch)
    assert answers(make(models[name], 4, 4)) != alone(name)
