"""Tensor parallelism: which part of each tensor a rank holds. Arithmetic only.

    q, k, v, gate, up       cut by rows       [out / T, in]     each rank computes its own heads and inner elements
    o, down                 cut by columns    [out, in / T]     and a part of every output: the parts are added up
    embedding, head         cut by rows of the vocabulary
    norms, and what makes MLA's latent        whole on every rank

With more ranks than KV heads each KV head is held by several of them; decode context parallelism has these share its
tokens (context_shard.py). What does not come out even is filled up with zeros, which change no result: a zero query
head meets zero columns of o, a zero row of gate makes silu(0) * 0. Heads are filled up only when asked to be, since
they cost KV-cache reads and compute.

Source: Megatron-LM (Shoeybi et al. 2019); vLLM's QKVParallelLinear for the replicated KV heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mini_engine.config import EngineConfig
from mini_engine.context_shard import ContextShard, check_context_parallel_size
from mini_engine.errors import ConfigError
from mini_engine.model_config import ModelConfig

QUERY_ROWS = ("q_proj", "q_b_proj", "kv_b_proj")
KV_ROWS = ("k_proj", "v_proj")
INNER_ROWS = ("gate_proj", "up_proj")
VOCABULARY_ROWS = ("embed_tokens", "lm_head")
ROWS, COLUMNS = 0, 1


class Part(NamedTuple):
    """A rank's part of a tensor: its shape, the axis it is cut along (None: it is whole), and which entries of that
    axis go where. What no run fills is zero.

    runs: (first entry in the whole tensor, first entry in the part, how many).
    """

    shape: tuple[int, ...]
    axis: int | None = None
    runs: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class ModelShard:
    """One rank's part of a model.

    model: the whole one. size: tensor_parallel_size. heads: query heads shared out, zero heads included.
    context: the rank's place in its context-parallel group, ranks being neighbours. q_replicate: hold the query
    projections of all ranks of that group.
    Raises ConfigError for sizes that do not fit the model, with the rule, the numbers and what would work.
    """

    model: ModelConfig
    rank: int = 0
    size: int = 1
    context: ContextShard = ContextShard()
    q_replicate: bool = False
    heads: int = 0

    def __post_init__(self) -> None:
        if not self.heads:
            object.__setattr__(self, "heads", self.model.num_attention_heads)
        _check_padding(self.model, self.heads)
        _check_tensor_parallel_size(self.model, self.heads, self.size)
        if self.context.size > 1:
            check_context_parallel_size(self.size, self.context.size, self.heads, self.model.num_key_value_heads)

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, rank: int = 0) -> ModelShard:
        """The part of `rank` in an engine with these settings."""
        dcp = config.decode_context_parallel_size
        context = ContextShard(rank % dcp, dcp, config.cp_kv_cache_interleave_size)
        q_replicate = config.dcp_q_replicate and dcp > 1
        heads = config.num_padded_query_heads or model.num_attention_heads
        return cls(model, rank, config.tensor_parallel_size, context, q_replicate, heads)

    @property
    def is_whole(self) -> bool:
        """Whether this is the model as it is."""
        return self.size == 1 and self.heads == self.model.num_attention_heads

    @property
    def config(self) -> ModelConfig:
        """The part as a model of its own: what its rank computes and caches."""
        model, size = self.model, self.size
        kv_heads = model.num_key_value_heads
        moe = model.moe and dataclasses.replace(
            model.moe, moe_intermediate_size=_share(model.moe.moe_intermediate_size, size)
        )
        return dataclasses.replace(
            model,
            num_attention_heads=self.heads // size,
            num_key_value_heads=max(1, kv_heads // size),
            intermediate_size=_share(model.intermediate_size, size),
            vocab_size=_share(model.vocab_size, size),
            moe=moe,
        )

    @property
    def own_heads(self) -> range:
        """The query heads whose results this rank projects back."""
        own = self.heads // self.size
        return range(self.rank * own, (self.rank + 1) * own)

    @property
    def query_heads(self) -> range:
        """The query heads this rank computes: its own, or those of its whole context group."""
        if not self.q_replicate:
            return self.own_heads
        first = self.rank - self.context.rank
        own = len(self.own_heads)
        return range(first * own, (first + self.context.size) * own)

    @property
    def kv_heads(self) -> range:
        """The KV heads this rank holds; several ranks hold the same one where there are more ranks than heads."""
        heads = self.model.num_key_value_heads
        if self.size >= heads:
            first = self.rank * heads // self.size
            return range(first, first + 1)
        own = heads // self.size
        return range(self.rank * own, (self.rank + 1) * own)

    def part(self, name: str, shape: tuple[int, ...]) -> Part:
        """The rank's part of a tensor by its checkpoint name; shape: of the whole."""
        module = name.split(".")[-2] if "." in name else name
        if module in QUERY_ROWS:
            return self._by_heads(shape, ROWS, self.query_heads)
        if module == "o_proj":
            return self._by_heads(shape, COLUMNS, self.own_heads)
        if module in KV_ROWS:
            width = shape[ROWS] // self.model.num_key_value_heads
            runs = ((self.kv_heads.start * width, 0, len(self.kv_heads) * width),)
            return Part((len(self.kv_heads) * width, *shape[1:]), ROWS, runs)
        if module in INNER_ROWS or module in VOCABULARY_ROWS:
            return self._evenly(shape, ROWS)
        if module == "down_proj":
            return self._evenly(shape, COLUMNS)
        return Part(shape)

    def _by_heads(self, shape: tuple[int, ...], axis: int, heads: range) -> Part:
        width = shape[axis] // self.model.num_attention_heads
        runs: list[tuple[int, int, int]] = []
        for place, head in _real_heads(self.model, self.heads, heads):
            if runs and runs[-1][0] + runs[-1][2] == head * width and runs[-1][1] + runs[-1][2] == place * width:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + width)
            else:
                runs.append((head * width, place * width, width))
        return Part(_with(shape, axis, len(heads) * width), axis, tuple(runs))

    def _evenly(self, shape: tuple[int, ...], axis: int) -> Part:
        own = _share(shape[axis], self.size)
        first = min(self.rank * own, shape[axis])
        length = min(own, shape[axis] - first)
        return Part(_with(shape, axis, own), axis, ((first, 0, length),) if length else ())


def _real_heads(model: ModelConfig, padded: int, heads: range) -> Iterator[tuple[int, int]]:
    """(place in the part, head of the model) of those of the padded `heads` that are not zero heads.

    Each KV head's group is filled up at its end, so that every query head keeps its KV head.
    """
    groups = model.num_key_value_heads
    wide, real = padded // groups, model.num_attention_heads // groups
    for place, head in enumerate(heads):
        group, within = divmod(head, wide)
        if within < real:
            yield place, group * real + within


def _share(number: int, size: int) -> int:
    """What each of `size` ranks holds of `number`, rounded up."""
    return -(-number // size)


def _with(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    return (*shape[:axis], length, *shape[axis + 1 :])


def _check_padding(model: ModelConfig, heads: int) -> None:
    groups = model.num_key_value_heads
    if heads < model.num_attention_heads or heads % groups:
        raise ConfigError(
            f"num_padded_query_heads {heads} must be a multiple of the {groups} KV heads and at least the model's "
            f"{model.num_attention_heads} query heads"
        )


def _check_tensor_parallel_size(model: ModelConfig, heads: int, size: int) -> None:
    """Query heads go to the ranks in whole numbers, and no rank may need two KV heads that it holds one of."""
    kv_heads = model.num_key_value_heads

    def works(t: int, h: int) -> bool:
        return h % t == 0 and max(t, kv_heads) % min(t, kv_heads) == 0

    if works(size, heads):
        return
    sizes = ", ".join(str(t) for t in range(1, heads + 1) if works(t, heads))
    padded = next((h for h in range(heads, 16 * heads) if h % kv_heads == 0 and works(size, h)), None)
    hint = f", or num_padded_query_heads {padded}" if padded and padded != heads else ""
    rule = f"must divide the {heads} query heads"
    if heads % size == 0:
        rule = f"and the {kv_heads} KV heads must divide one another, so that every rank holds as many KV heads"
    raise ConfigError(f"tensor_parallel_size {size} {rule}. What works: {sizes}{hint}")
