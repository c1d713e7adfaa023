"""Attention over the paged cache, and the one contract that every backend keeps.

Attention returns `AttentionState(out, lse)`: the softmax-weighted values, and the natural logarithm of the sum of
exp(scores) they were weighted by. Two states over disjoint keys merge into the state over all of them, so context can
be cut anywhere: into splits, cached and new tokens, or ranks. The state over no keys is (0, -inf).

    q             [T, heads, D]                   tokens of all sequences one after the other
    k, v cache    [num_blocks, block_size, kv_heads, D]
    out           [T, heads, D] float32
    lse           [T, heads]    float32

Source: the (out, lse) state and its merge as in FlashInfer (Ye et al. 2025) and FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mini_engine.batch import Batch
from mini_engine.block_pool import NULL_BLOCK


class AttentionState(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state over the keys of both. Associative; (0, -inf) is neutral; a NaN or +inf lse counts as empty."""
    lse_a, lse_b = (torch.where(x.lse < float("inf"), x.lse, float("-inf")) for x in (a, b))
    top = torch.maximum(lse_a, lse_b).clamp_min(torch.finfo(lse_a.dtype).min)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    share = torch.where(total > 0, 1 / total, 0.0)
    part_a, part_b = (
        torch.where(weight[..., None] > 0, x.out * (weight * share)[..., None], 0.0)
        for x, weight in ((a, weight_a), (b, weight_b))
    )
    return AttentionState(part_a + part_b, top + torch.log(total))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor | None = None
) -> AttentionState:
    """Plain attention, written as the formula; the reference for every faster way.

    q [..., M, D], k and v [..., L, D], visible [..., M, L] bool (None: all). A row that sees nothing is (0, -inf).
    """
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
        v = v.float().masked_fill(~visible.any(-2)[..., None], 0.0)  # 0 * NaN is NaN: unwritten slots count as 0
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1).masked_fill(torch.isneginf(lse)[..., None], 0.0)
    return AttentionState(torch.matmul(weights, v.float()), lse)


def paged_attention_reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch, scale: float
) -> AttentionState:
    """Causal attention of a ragged batch, one sequence at a time: slow, short, and what kernels are tested against."""
    group = q.shape[1] // k_cache.shape[2]
    outs, lses, first = [], [], 0
    for row, (num_new, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        length = context + num_new
        k, v = (gather_tokens(cache, batch.block_table[row], length).transpose(0, 1) for cache in (k_cache, v_cache))
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        positions = torch.arange(context, length, device=q.device)
        visible = torch.arange(length, device=q.device)[None, :] <= positions[:, None]
        state = attend(q[first : first + num_new].transpose(0, 1), k, v, scale, visible)
        outs.append(state.out.transpose(0, 1))
        lses.append(state.lse.transpose(0, 1))
        first += num_new
    return AttentionState(torch.cat(outs), torch.cat(lses))


class TorchAttention:
    """The torch backend: made once a step from its batch, called once a layer.

    Sequences with one new token go together, padded to the longest; each longer chunk goes alone. The rows of a KV
    head are all its query heads (GQA packing), so that K and V are never repeated.
    """

    def __init__(self, batch: Batch, block_size: int, scale: float):
        self.batch = batch
        self.scale = scale
        self.block_table = batch.block_table.long()
        n = batch.num_decodes
        self.longest = 0
        self.mask: torch.Tensor | None = None  # added to the scores: 0, or -inf beyond the end of a sequence
        self.unused: torch.Tensor | None = None
        if n:
            lens = torch.tensor(batch.context_lens[:n]) + 1
            self.longest = int(lens.max())
            width = -(-self.longest // block_size)
            blocks = self.block_table[:n, :width]
            if lens.min() < self.longest:
                key, device = torch.arange(width * block_size), batch.seq_lens.device
                ends = (lens + block_size - 1) // block_size * block_size
                hidden, beyond = key >= lens[:, None], key >= ends[:, None]
                blocks = blocks.masked_fill(beyond[:, ::block_size].to(device), NULL_BLOCK)
                mask = torch.zeros(n, 1, 1, self.longest).masked_fill_(hidden[:, None, None, : self.longest], -math.inf)
                self.mask = mask.to(device)
                self.unused = (hidden & ~beyond).flatten().nonzero().squeeze(1).to(device)
            self.decode_blocks = _index(blocks.flatten())
        self.chunk_blocks = {
            row: _index(self.block_table[row, : -(-(batch.context_lens[row] + num_new) // block_size)])
            for row, num_new in enumerate(batch.query_lens[n:], n)
        }

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> AttentionState:
        """q [T, heads, D], caches of one layer, v perhaps a view of k; the new tokens' K and V are already in them."""
        n = self.batch.num_decodes
        states = [self._decodes(q[:n], k_cache, v_cache)] if n else []
        first = n
        for row in range(n, len(self.batch.query_lens)):
            num_new = self.batch.query_lens[row]
            states.append(self._chunk(q[first : first + num_new], k_cache, v_cache, row))
            first += num_new
        if len(states) == 1:
            return states[0]
        return AttentionState(torch.cat([s.out for s in states]), torch.cat([s.lse for s in states]))

    def _decodes(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> AttentionState:
        n, heads, dim = q.shape
        if n == 1:
            k, v = (_read(cache, self.decode_blocks, self.longest) for cache in (k_cache, v_cache))
            return _one_row_attention(q[0], k, v, self.scale)
        k, v = (self._gather_decodes(cache, n) for cache in (k_cache, v_cache))
        packed = q.view(n, k.shape[1], -1, dim)
        state = _softmax_attention(packed, k, v, self.scale, mask=self.mask)
        return AttentionState(state.out.reshape(n, heads, -1), state.lse.reshape(n, heads))

    def _gather_decodes(self, cache: torch.Tensor, n: int) -> torch.Tensor:
        """What the decodes read, [n, kv_heads, longest, D], with zeros beyond the end of each sequence.

        A mask alone does not keep out what was left there: 0 * NaN and NaN - inf are NaN. Whole blocks beyond the end
        are read from the null block, which holds zeros, so that only the rest of started blocks is to be cleared.
        """
        tokens = _read(cache, self.decode_blocks)
        if self.unused is not None:  # then blocks of several sequences were gathered: a copy
            tokens.index_fill_(0, self.unused, 0.0)
        return tokens.view(n, -1, *cache.shape[2:])[:, : self.longest].transpose(1, 2)

    def _chunk(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, row: int) -> AttentionState:
        """The context before the chunk, seen by all of it, merged with the chunk, seen causally."""
        num_new, heads, dim = q.shape
        context = self.batch.context_lens[row]
        length = context + num_new
        k, v = (_read(cache, self.chunk_blocks[row], length).transpose(0, 1) for cache in (k_cache, v_cache))
        kv_heads = k.shape[0]
        group = heads // kv_heads
        q = q.view(num_new, kv_heads, group, dim)
        per_head = q.permute(1, 2, 0, 3)
        own_k, own_v = (x[:, None, context:].expand(-1, group, -1, -1) for x in (k, v))
        state = _softmax_attention(per_head, own_k, own_v, self.scale, causal=True)
        out, lse = state.out.permute(2, 0, 1, 3), state.lse.permute(2, 0, 1)
        if context:
            packed = q.permute(1, 2, 0, 3).reshape(1, kv_heads, group * num_new, dim)
            seen = _softmax_attention(packed, k[None, :, :context], v[None, :, :context], self.scale)
            seen_out = seen.out.view(kv_heads, group, num_new, -1).permute(2, 0, 1, 3)
            out, lse = merge(
                AttentionState(seen_out, seen.lse.view(kv_heads, group, num_new).permute(2, 0, 1)),
                AttentionState(out, lse),
            )
        return AttentionState(out.reshape(num_new, heads, -1), lse.reshape(num_new, heads))


def block_run(blocks: torch.Tensor) -> slice | None:
    """The blocks as a slice of the pool, where they lie on a CPU and side by side."""
    if blocks.device.type != "cpu":
        return None
    first = int(blocks[0])
    side_by_side = torch.arange(first, first + len(blocks), dtype=blocks.dtype)
    return slice(first, first + len(blocks)) if torch.equal(blocks, side_by_side) else None


def _index(blocks: torch.Tensor) -> torch.Tensor | slice:
    """What to index a cache with to read `blocks`: a slice, which copies nothing, where they lie side by side."""
    run = block_run(blocks)
    return blocks if run is None else run


def _read(cache: torch.Tensor, blocks: torch.Tensor | slice, length: int | None = None) -> torch.Tensor:
    """The first `length` tokens (None: all) of blocks of a cache, one after the other, [length, kv_heads, D].

    index_select copies block by block, which takes less than half the time of indexing with a tensor.
    """
    if isinstance(blocks, torch.Tensor):
        return cache.index_select(0, blocks).flatten(0, 1)[:length]
    size = cache.shape[1]
    first = blocks.start * size
    return cache.flatten(0, 1)[first : blocks.stop * size if length is None else first + length]


def gather_tokens(cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a sequence, [length, kv_heads, D]."""
    num_blocks = -(-length // cache.shape[1])
    return cache.index_select(0, block_table[:num_blocks]).flatten(0, 1)[:length]


def _one_row_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> AttentionState:
    """The formula for one sequence's next token, in few operators: there is too little work to share out to threads.

    q [heads, D], k and v [L, kv_heads, D]. log_softmax = score - lse, so any one score yields the lse.
    """
    heads, dim = q.shape
    packed = q.view(k.shape[1], -1, dim).float() * scale
    scores = torch.bmm(packed, k.permute(1, 2, 0).float())
    log_weights = torch.log_softmax(scores, dim=-1)
    lse = scores[..., 0] - log_weights[..., 0]
    out = torch.bmm(log_weights.exp_(), v.transpose(0, 1).float())
    return AttentionState(out.view(1, heads, -1), lse.view(1, heads))


def _softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> AttentionState:
    """q [N, H, M, D], k and v [N, H, L, D]; mask [N, 1, 1, L] float32. torch's fused CPU operator, or the formula."""
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:  # it knows one head size
        k, v = k.to(q.dtype), v.to(q.dtype)
        mask = None if mask is None else mask.to(q.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return AttentionState(out.float(), lse)
    visible = None if mask is None else mask == 0
    if causal:
        visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return attend(q, k, v, scale, visible)
