"""Attention over a context that is cut across ranks: gather the queries, attend locally, combine by log-sum-exp.

    N ranks of a context group hold the same KV head(s) and H query heads between them, H/N each. Per layer:

    q [T, H/N, Dq]  --all-gather-->  [T, H, Dq]  --local context-->  state (out [T, H, Dv], lse [T, H])
                                                                        |  combine: two ways
    ag_rs   all-gather lse, scale out by exp(lse - total), reduce-scatter out over heads   (2 collectives)
    a2a     all-to-all of (out, lse) packed together, merge what came                     (1 collective)
                                                                        v
                                        state of the whole context, own heads [T, H/N, Dv]
                                        merged with the new tokens' attention among themselves

Where the query projection is replicated, every rank has all H heads from the start and the first all-gather falls away.
Queries and `out` travel in the model's dtype, lse (natural log, everywhere) in float32, and the sums are float32.
No byte depends on the length of the context. Multi-head latent attention is the same with one KV head: Dq = latent +
rope, Dv = latent, keys and values from one cache.

A rank that holds no token of a sequence contributes the empty state (0, -inf), and takes part in every collective: they
may be skipped only for what all ranks see alike, such as a step in which no sequence has any context.

Source: vLLM's decode context parallelism (`cp_lse_ag_out_rs`, `dcp_comm_backend`), Helix (Bhatia et al. 2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from mini_engine.attention import AttentionState, attend, merge
from mini_engine.context_shard import ContextShard
from mini_engine.groups import Group, GroupError

CommBackend = Literal["ag_rs", "a2a"]
MergeParts = Callable[[torch.Tensor, torch.Tensor], AttentionState]


def merge_weights(lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each part's share of the whole, and the lse of the whole. lses [N, ...] float32; returns [N, ...] and [...].

    Parts whose lse is -inf, +inf or NaN are empty: share 0. Where all are, the whole is -inf.
    """
    lses = torch.where(lses < math.inf, lses, -math.inf)
    top = lses.amax(0)
    top = torch.where(torch.isneginf(top), 0.0, top)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    # Not exp(lse - log total): of an lse of 40,000, float32 keeps two digits behind the point.
    return torch.where(total > 0, weights / total, 0.0), top + torch.log(total)


def weighted(out: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """out * share in float32, 0 where the share is 0: what an empty part holds was perhaps never written."""
    share = share[..., None]
    return torch.where(share == 0, 0.0, out.float() * share)


def merge_parts(outs: torch.Tensor, lses: torch.Tensor) -> AttentionState:
    """The state over the keys of all parts. outs [N, T, heads, D], lses [N, T, heads]."""
    shares, total = merge_weights(lses)
    return AttentionState(weighted(outs, shares).sum(0), total)


def combine_ag_rs(state: AttentionState, group: Group, dtype: torch.dtype = torch.float32) -> AttentionState:
    """The whole context's state for this rank's heads, [T, H/N, D], from every rank's part for all H heads.

    dtype: what `out` travels in. The shares of all ranks need every lse, so these are gathered first.
    """
    lses = group.all_gather(state.lse.float()[None])
    shares, total = merge_weights(lses)
    out = group.reduce_scatter(weighted(state.out, shares[group.rank]).to(dtype), dim=1)
    return AttentionState(out, _own_heads(total, group))


def combine_a2a(
    state: AttentionState, group: Group, dtype: torch.dtype = torch.float32, merge_all: MergeParts = merge_parts
) -> AttentionState:
    """The same in one collective: each rank sends every other that one's heads, out and lse side by side as bytes.

    merge_all: merges what came; a backend may have a kernel for it.
    """
    num_tokens, heads, dim = state.out.shape
    own = _heads_per_rank(heads, group)
    by_owner = (num_tokens, group.size, own)
    outs = state.out.to(dtype).reshape(*by_owner, dim).transpose(0, 1)
    lses = state.lse.float().reshape(*by_owner, 1).transpose(0, 1)
    packed = torch.cat([outs.contiguous().view(torch.uint8), lses.contiguous().view(torch.uint8)], dim=-1)
    came = group.all_to_all(packed)
    width = dim * dtype.itemsize
    return merge_all(
        came[..., :width].contiguous().view(dtype), came[..., width:].contiguous().view(torch.float32).squeeze(-1)
    )


def combine(
    state: AttentionState,
    group: Group,
    comm_backend: CommBackend,
    dtype: torch.dtype = torch.float32,
    merge_all: MergeParts = merge_parts,
) -> AttentionState:
    """One of the two ways by its name. A group of one rank has the whole context: its state is returned as it is."""
    if group.size == 1:
        return state
    return (
        combine_ag_rs(state, group, dtype) if comm_backend == "ag_rs" else combine_a2a(state, group, dtype, merge_all)
    )


def context_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    shard: ContextShard,
    scale: float,
) -> AttentionState:
    """Attention over this rank's part of each sequence's context, which all its new tokens see whole. The reference.

    q [T, H, Dq], the new tokens of all sequences one after the other. k_cache [blocks, B, kv_heads, Dq], v_cache
    [blocks, B, kv_heads, Dv], of this rank. block_table [S, W]. query_lens, context_lens: tokens of each sequence in
    this step and before it, the whole sequence's.
    """
    shard.check_block_size(k_cache.shape[1])
    outs, lses, first = [], [], 0
    for table, num_new, context in zip(block_table, query_lens, context_lens, strict=True):
        length = shard.local_length(context)
        k, v = (_read(cache, table, length) for cache in (k_cache, v_cache))
        # All query heads of a KV head are rows of one product, so that K and V are never repeated.
        by_kv_head = q[first : first + num_new].unflatten(1, (len(k), -1)).permute(1, 2, 0, 3)
        state = attend(by_kv_head.flatten(1, 2), k, v, scale)
        heads, rows = q.shape[1], (len(k), -1, num_new)
        outs.append(state.out.unflatten(1, rows[1:]).permute(2, 0, 1, 3).reshape(num_new, heads, -1))
        lses.append(state.lse.view(rows).permute(2, 0, 1).reshape(num_new, heads))
        first += num_new
    return AttentionState(torch.cat(outs), torch.cat(lses))


def context_parallel_attention(
    q: torch.Tensor,
    new_tokens: AttentionState,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    shard: ContextShard,
    scale: float,
    group: Group,
    comm_backend: CommBackend = "ag_rs",
    q_replicate: bool = False,
) -> AttentionState:
    """A layer's attention on one rank: the context cut over `group`, merged with the new tokens among themselves.

    q: this rank's heads [T, H/N, Dq], or all H of the group where `q_replicate`. new_tokens: causal attention of the
    new tokens among themselves, this rank's heads [T, H/N, Dv]; it needs no other rank. Returns this rank's heads.
    Raises GroupError where the shard is not the group's, or the heads cannot be dealt out.
    """
    if (shard.rank, shard.size) != (group.rank, group.size):
        raise GroupError(
            f"the shard is {shard.rank} of {shard.size}, the group's rank {group.rank} of {group.size}: they must agree"
        )
    if not any(context_lens):  # alike on every rank; local lengths are not
        return new_tokens
    everyone = q if q_replicate else group.all_gather(q, dim=1)
    local = context_attention(everyone, k_cache, v_cache, block_table, query_lens, context_lens, shard, scale)
    return merge(combine(local, group, comm_backend, q.dtype), new_tokens)


def gather_context(
    cache: torch.Tensor, table: torch.Tensor, length: int, shard: ContextShard, group: Group
) -> torch.Tensor:
    """A sequence's whole context on every rank, [kv_heads, length, D]: for a long chunk of a prompt.

    Rank after rank, not in the order of positions: all new tokens see all of it, so the order does not matter. Each
    rank sends as many tokens as the first one has, so that all send alike. Bytes grow with the context, where those of
    gathered queries and returned results grow with the new tokens: the way to go where these are many.
    """
    if length == 0 or group.size == 1:
        return _read(cache, table, length)
    longest = ContextShard(0, shard.size, shard.interleave).local_length(length)
    own = _read(cache, table, shard.local_length(length))
    padded = torch.nn.functional.pad(own, (0, 0, 0, longest - own.shape[1]))
    parts = group.all_gather(padded[None])
    lengths = [ContextShard(rank, shard.size, shard.interleave).local_length(length) for rank in range(group.size)]
    return torch.cat([part[:, :count] for part, count in zip(parts, lengths, strict=True)], 1)


def _heads_per_rank(heads: int, group: Group) -> int:
    if heads % group.size:
        raise GroupError(f"{heads} query heads cannot be dealt out evenly to {group.size} ranks")
    return heads // group.size


def _own_heads(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part of x [T, H]."""
    own = _heads_per_rank(x.shape[1], group)
    return x[:, group.rank * own : (group.rank + 1) * own]


def _read(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a sequence on this rank, [kv_heads, length, D]."""
    num_blocks = -(-length // cache.shape[1])
    return cache.index_select(0, table[:num_blocks].long()).flatten(0, 1)[:length].transpose(0, 1)
