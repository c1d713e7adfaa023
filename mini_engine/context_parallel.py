"""A layer's attention on a rank that holds a part of every context: `dcp.py`'s exchanges over the engine's paged cache.

    this rank's new tokens    K and V stored at their slots, those of other ranks left out
    new tokens                attended among themselves, own heads, no other rank needed
    contexts                  a sequence's bytes on the wire are the fewer of two:
        queries travel        gather q, attend locally, combine by log-sum-exp        grows with its new tokens
        context travels       gather K and V, attend alone                            grows with its context

Decodes always send queries. A long chunk of a prompt after a short context gets the context. All ranks see the same
lengths, so all choose alike. Sequences without context take part in no exchange.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from mini_engine.attention import AttentionState, attend, merge
from mini_engine.batch import Batch, select_sequences
from mini_engine.context_shard import ContextShard
from mini_engine.dcp import CommBackend, combine, gather_context
from mini_engine.groups import Group
from mini_engine.kv_cache import KVCache
from mini_engine.ops import Contexts, Ops, StateAttention

LSE_BYTES = 4


class NewTokens(NamedTuple):
    """The new tokens of one sequence: `tokens` of the batch, after a context of `context` tokens."""

    row: int
    tokens: slice
    context: int


class Exchange(NamedTuple):
    """A step's plan: sequences that get the whole context, and the attention of the rows whose queries travel."""

    get_context: list[NewTokens]
    rows: torch.Tensor
    send_queries: StateAttention | None


class ContextParallelLayers:
    """See `layer_attention.LayerAttention`. batch: the whole sequences', with this rank's slots.

    q_replicate: q comes with the heads of all ranks of the group, in rank order. dtype: what the model computes in.
    """

    def __init__(
        self,
        batch: Batch,
        kv: KVCache,
        ops: Ops,
        scale: float,
        dtype: torch.dtype,
        shard: ContextShard,
        group: Group,
        comm_backend: CommBackend,
        q_replicate: bool,
    ):
        self.batch, self.kv, self.ops, self.scale, self.dtype = batch, kv, ops, scale, dtype
        self.shard, self.group, self.comm_backend, self.q_replicate = shard, group, comm_backend, q_replicate
        self._settings = (kv, ops, scale, dtype, shard, group, comm_backend, q_replicate)
        self._own = (batch.slot_mapping >= 0).nonzero().squeeze(1)
        self._slots = batch.slot_mapping[self._own]
        self._sequences = _sequences(batch)
        self._exchange: Exchange | None = None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        own_q = self._own_heads(q)
        state = self._among_themselves(own_q, k, v)
        self.store(layer, k, v)
        plan = self._exchange = self._exchange or self._plan(own_q, k, v)
        for new in plan.get_context:
            seen = self._with_whole_context(layer, own_q[new.tokens], new)
            _put(state, new.tokens, merge(seen, AttentionState(*(x[new.tokens] for x in state))))
        if plan.send_queries is not None:
            rows = plan.rows
            everyone = q[rows] if self.q_replicate else self.group.all_gather(own_q[rows].contiguous(), dim=1)
            local = plan.send_queries(layer, everyone)
            seen = combine(local, self.group, self.comm_backend, self.dtype, self.ops.merge)
            _put(state, rows, merge(seen, AttentionState(*(x[rows] for x in state))))
        return state.out

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.ops.write(self.kv, layer, k[self._own], v[self._own], self._slots)

    def only(self, rows: Seq[int]) -> ContextParallelLayers:
        return ContextParallelLayers(select_sequences(self.batch, rows), *self._settings)

    def context(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathered from all ranks, in rank order."""
        length, table = self.batch.context_lens[row], self.batch.block_table[row]
        k_cache, v_cache = self.kv.layers[layer]
        k = gather_context(k_cache, table, length, self.shard, self.group)
        if self.kv.is_latent:
            return k, k[..., : v_cache.shape[-1]]
        return k, gather_context(v_cache, table, length, self.shard, self.group)

    def _own_heads(self, q: torch.Tensor) -> torch.Tensor:
        if not self.q_replicate:
            return q
        own = q.shape[1] // self.group.size
        return q[:, self.group.rank * own : (self.group.rank + 1) * own]

    def _plan(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Exchange:
        """Which way each sequence goes, by the shapes of a layer, which are those of all layers."""
        heads = q.shape[1] * self.group.size
        size = self.dtype.itemsize
        query_bytes = heads * ((0 if self.q_replicate else q.shape[2] * size) + v.shape[2] * size + LSE_BYTES)
        token_bytes = self.kv.bytes_per_token // len(self.kv.layers)
        get_context: list[NewTokens] = []
        send: list[NewTokens] = []
        for new in self._sequences:
            num_new = new.tokens.stop - new.tokens.start
            if new.context:
                travels = self._context_travels(num_new, new.context * token_bytes, num_new * query_bytes)
                (get_context if travels else send).append(new)
        rows = [token for new in send for token in range(new.tokens.start, new.tokens.stop)]
        attention = None
        if send:
            contexts = Contexts(
                self.batch.block_table[[new.row for new in send]],
                tuple(new.tokens.stop - new.tokens.start for new in send),
                tuple(self.shard.local_length(new.context) for new in send),
            )
            attention = self.ops.context_attention(contexts, self.kv, self.scale)
        return Exchange(get_context, torch.tensor(rows, dtype=torch.int64, device=q.device), attention)

    @staticmethod
    def _context_travels(num_new: int, context_bytes: int, query_bytes: int) -> bool:
        """Whether to gather a sequence's context in place of its queries."""
        return num_new > 1 and context_bytes < query_bytes

    def _among_themselves(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionState:
        """Causal attention of each sequence's new tokens, own heads. A lone one sees itself: its value, its score."""
        group = q.shape[1] // k.shape[1]
        k, v = (self.kv.rounded(x).float().repeat_interleave(group, dim=1) for x in (k, v))
        state = AttentionState(v, (q.float() * k).sum(-1) * self.scale)
        for new in self._sequences:
            num_new = new.tokens.stop - new.tokens.start
            if num_new > 1:
                causal = torch.ones(num_new, num_new, dtype=torch.bool, device=q.device).tril()
                queries, keys, values = (x[new.tokens].transpose(0, 1) for x in (q, k, v))
                _put(state, new.tokens, _tokens_first(attend(queries, keys, values, self.scale, causal)))
        return state

    def _with_whole_context(self, layer: int, q: torch.Tensor, new: NewTokens) -> AttentionState:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[0], dim=0) for x in self.context(layer, new.row))
        return _tokens_first(attend(q.transpose(0, 1), k, v, self.scale))


def _sequences(batch: Batch) -> list[NewTokens]:
    found, first = [], 0
    for row, (num_new, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        found.append(NewTokens(row, slice(first, first + num_new), context))
        first += num_new
    return found


def _tokens_first(state: AttentionState) -> AttentionState:
    return AttentionState(state.out.transpose(0, 1), state.lse.transpose(0, 1))


def _put(state: AttentionState, rows: slice | torch.Tensor, part: AttentionState) -> None:
    state.out[rows], state.lse[rows] = part.out, part.lse
