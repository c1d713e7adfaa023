"""The decoder on a CPU: every layer writes its results where the layer before wrote its own.

A layer's products push all other code out of the caches, so that what is between them costs several times what it
costs alone: to make a tensor, or to look up where one lies. Here that is done once a step, and layers call kernels with
numbers: a step of one sequence takes a tenth less in float32, a fifth less with 4-bit weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mini_engine import numba_kernels as kernels
from mini_engine.batch import Batch
from mini_engine.layer_attention import LayerAttention, PagedLayers
from mini_engine.model import Decoder
from mini_engine.numba_ops import DecodeAttention
from mini_engine.ops import Ops


class NumbaDecoder(Decoder):
    """A `Decoder` of one rank. Its layers compute the same, to the bit, as the plain one's on `NumbaOps`; they take
    the plain one's way where a model does not compute in float32."""

    def run_layers(self, x: torch.Tensor, batch: Batch, attention: LayerAttention, ops: Ops) -> torch.Tensor:
        if x.dtype != torch.float32:
            return super().run_layers(x, batch, attention, ops)
        config, first = self.config, self.layers[0]
        (rows, width), dim, kv_heads = x.shape, config.head_dim, config.num_key_value_heads
        heads, inner = config.num_attention_heads, first.gate_up.out_features // 2
        eps, row = config.rms_norm_eps, first.qkv.out_features
        h, added = torch.empty_like(x), torch.empty_like(x)
        qkv, gate_up, act = (torch.empty(rows, size) for size in (row, 2 * inner, inner))
        q, k, v = qkv.view(rows, -1, dim).split((heads, kv_heads, kv_heads), 1)
        attend = _by_layer(attention, q, k, v)
        p_x, p_h, p_added, p_gate_up, p_act = (tensor.data_ptr() for tensor in (x, h, added, gate_up, act))
        p_q, p_k, p_cos_sin, p_positions = (t.data_ptr() for t in (q, k, self.cos_sin, batch.positions))
        for i, layer in enumerate(self.layers):
            kernels.rms_norm(p_x, width, layer.input_norm.data_ptr(), p_h, width, rows, 1, width, eps)
            layer.qkv.write(h, qkv)
            if layer.q_norm is not None and layer.k_norm is not None:
                kernels.rms_norm(p_q, row, layer.q_norm.data_ptr(), p_q, row, rows, heads, dim, eps)
                kernels.rms_norm(p_k, row, layer.k_norm.data_ptr(), p_k, row, rows, kv_heads, dim, eps)
            kernels.rope(p_q, row, p_cos_sin, p_positions, rows, heads + kv_heads, dim)  # of K too, which is next to Q
            layer.o.write_sum(x, attend(i), added)
            kernels.rms_norm(p_added, width, layer.post_norm.data_ptr(), p_h, width, rows, 1, width, eps)
            layer.gate_up.write(h, gate_up)
            kernels.swiglu(p_gate_up, p_act, rows, inner)
            layer.down.write_sum(added, act, x)
        return x


def _by_layer(
    attention: LayerAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[int], torch.Tensor]:
    """`attention` of each layer, whose q, k and v all lie where these do."""
    paged = attention.paged if isinstance(attention, PagedLayers) else None
    if isinstance(paged, DecodeAttention):
        return paged.by_layer(q, k, v)
    return lambda layer: attention(layer, q, k, v).flatten(1)
