"""The two forms of multi-head latent attention (MLA), which compute the same.

A token leaves a latent c [r] and a rotated key p, the same for all heads. Head h has the key [K_h c, p] and the value
V_h c:

    naive       project the latents up to keys and values of each head, then attend        width nope + rope and v
    absorbed    score = q_nope · K_h c + q_rope · p = [K_hᵀ q_nope, q_rope] · [c, p]       width r + rope and r
                result = V_h (Σ weight · c)

Absorbed, all heads read one cached vector, so that nothing is projected again each step: right for few new tokens.
Naive has narrower products for each pair of query and key, and pays r · (nope + v) a key and head: right for many
(`MLAShape.naive_break_even`).

    q           [T, heads, nope + rope]     rotated
    latents     [L, r + rope]               normed latent, rotated key
    up          [heads, nope + v, r]        K_h above V_h, kv_b_proj of the checkpoint by heads

Source: DeepSeek-V2 (DeepSeek-AI 2024, 2.1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mini_engine.model_config import MLAShape


def absorbed_query(q: torch.Tensor, up: torch.Tensor, shape: MLAShape) -> torch.Tensor:
    """[T, heads, r + rope]: what is compared with latents as they are cached."""
    nope, rope = q.split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), dim=-1)
    return torch.cat((_per_head(nope, up[:, : shape.qk_nope_head_dim]), rope), dim=-1)


def values_of(latents: torch.Tensor, up: torch.Tensor, shape: MLAShape) -> torch.Tensor:
    """[T, heads, v] of attention's results over latents [T, heads, r]."""
    return _per_head(latents, up[:, shape.qk_nope_head_dim :].transpose(1, 2))


def naive_attention(
    q: torch.Tensor, latents: torch.Tensor, up: torch.Tensor, shape: MLAShape, scale: float
) -> torch.Tensor:
    """[T, heads, v] of one sequence's T new tokens, whose latents are the last T; they see each other causally, and all
    latents before them, in whatever order these are.

    Holds K and V of all heads for the time of a layer: L · heads · `MLAShape.naive_dim` elements.
    """
    num_new, heads = q.shape[:2]
    latent, rope = latents.split((shape.kv_lora_rank, shape.qk_rope_head_dim), dim=-1)
    projected = F.linear(latent, up.flatten(0, 1)).view(len(latents), heads, -1)
    nope, v = projected.split((shape.qk_nope_head_dim, shape.v_head_dim), dim=-1)
    k = torch.cat((nope, rope[:, None].expand(-1, heads, -1)), dim=-1)
    # Filled up to the keys' width: fused operators know one width, and take half the time of the others (on a CPU).
    v = F.pad(v, (0, max(0, k.shape[-1] - v.shape[-1])))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    context = len(latents) - num_new
    mask = torch.ones(num_new, len(latents), dtype=torch.bool, device=q.device).tril(context) if context else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[0].transpose(0, 1)[..., : shape.v_head_dim]


def _per_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """x [T, heads, a] by the head's own matrix [heads, a, b]: [T, heads, b]."""
    return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)


def half_split(rows: torch.Tensor) -> torch.Tensor:
    """Reorder rows [..., D, in] of a projection from pairs (2i, 2i+1), which DeepSeek rotates, to (i, i + D/2), which
    this engine does: q · k is a sum over the elements, whatever their order, if both have the same.
    """
    return rows.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2)
