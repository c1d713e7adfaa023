"""A Llama or Qwen3 decoder: weights as plain tensors, the forward pass as one short function.

    tokens [T] -> embed -> layers x (norm, attention, add, norm, SwiGLU, add) -> norm of the R rows to draw from
    -> logits [R, vocab]

On a rank of a tensor-parallel group it is a decoder of fewer heads, a narrower FFN and a part of the vocabulary; the
ranks' parts of each layer's two results are added up.

Tokens of all sequences lie one after the other; only attention knows where one ends. Q, K and V are one matrix, gate
and up another, so that a decode step makes four matrix products a layer instead of seven.

Source: Llama (Touvron et al. 2023), Qwen3 (QK-norm), rotary embedding in Hugging Face's half-split layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mini_engine.batch import Batch
from mini_engine.checkpoint import Checkpoint
from mini_engine.config import ModelConfig
from mini_engine.groups import Group, LocalGroup
from mini_engine.layer_attention import LayerAttention
from mini_engine.linear import HalfLinear, Linear
from mini_engine.ops import Ops
from mini_engine.rotary import rotary_table
from mini_engine.vocab_parallel import VocabParallelEmbedding
from mini_engine.weight_loader import WeightLoader


@dataclass
class Layer:
    """One decoder layer. Matrices are [out, in]; qkv stacks Q, K, V rows, gate_up stacks gate and up rows."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """The model on one device. `forward` has no state of its own: the KV cache comes with the attention passed in.

    checkpoint, config: of this rank's part. int4: use a GGUF file's 4-bit weights as they are where few rows are
    multiplied (see `linear.py`; CPU only).
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int | None = None,
        int4: bool = False,
        group: Group | None = None,
    ):
        self.config = config
        self.group = group or LocalGroup.create(1)[0]
        self.scale = 1 / math.sqrt(config.head_dim)
        load = WeightLoader(checkpoint, dtype, device, int4)
        self.embedding = load("model.embed_tokens.weight")
        self.embed = VocabParallelEmbedding(self.embedding, self.group)
        self.layers = [_load_layer(load, config, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self.norm = load("model.norm.weight")
        head = self.embedding if config.tie_word_embeddings else load("lm_head.weight")
        self.head = HalfLinear(head) if load.has_int4 else Linear(head)
        self.cos_sin = rotary_table(config, max_model_len or config.max_position_embeddings, dtype, device)

    def weight_tensors(self) -> list[torch.Tensor]:
        """Every weight held, once."""
        tensors = [self.embedding]
        for part in self._parts():
            tensors += part.tensors() if isinstance(part, Linear) else [part]
        return list({tensor.data_ptr(): tensor for tensor in tensors}.values())

    def read_bytes(self) -> int:
        """Bytes of weights that a decode step of one sequence reads."""
        return sum(part.read_bytes() if isinstance(part, Linear) else part.nbytes for part in self._parts())

    def _parts(self) -> list[Linear | torch.Tensor]:
        """All weights but the input embedding."""
        parts = [part for layer in self.layers for part in vars(layer).values() if part is not None]
        return [*parts, self.norm, self.head]

    def forward(self, batch: Batch, attention: LayerAttention, ops: Ops) -> torch.Tensor:
        """Logits [R, vocab] float32 of the rows `batch.logits_indices`, of this rank's part of the vocabulary.

        attention: of this batch, which stores K and V of all T tokens; ops: the steps between the matrix products, in
        torch or as Triton kernels.
        """
        x = self.run_layers(self.embed(batch.input_ids), batch, attention, ops)
        x = ops.rms_norm(x[batch.logits_indices], self.norm, self.config.rms_norm_eps)
        return self.head(x).float()

    def run_layers(self, x: torch.Tensor, batch: Batch, attention: LayerAttention, ops: Ops) -> torch.Tensor:
        """x [T, hidden_size] after all layers."""
        config = self.config
        kv_heads, dim = config.num_key_value_heads, config.head_dim
        heads = self.layers[0].qkv.out_features // dim - 2 * kv_heads  # with dcp_q_replicate more than those of `o`
        rotate = ops.rotary(self.cos_sin, batch.positions)
        for i, layer in enumerate(self.layers):
            h = ops.rms_norm(x, layer.input_norm, config.rms_norm_eps)
            qkv = layer.qkv(h).view(len(x), heads + 2 * kv_heads, dim)
            qk, v = qkv.split((heads + kv_heads, kv_heads), 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = ops.qk_norm(qk, layer.q_norm, layer.k_norm, heads, config.rms_norm_eps)
            q, k = rotate(qk).split((heads, kv_heads), 1)
            out = attention(i, q, k, v)
            x = self._add(x, layer.o, out.flatten(1))
            h = ops.rms_norm(x, layer.post_norm, config.rms_norm_eps)
            x = self._add(x, layer.down, ops.swiglu(layer.gate_up(h)))
        return x

    def _add(self, x: torch.Tensor, linear: Linear, h: torch.Tensor) -> torch.Tensor:
        """x + linear(h), where each rank has a part of h and the product needs all ranks' parts."""
        if self.group.size == 1:
            return linear.add_to(x, h)
        return x + self.group.all_reduce(linear(h.to(x.dtype)))


def _load_layer(load: WeightLoader, config: ModelConfig, prefix: str) -> Layer:
    attn, mlp = prefix + "self_attn.", prefix + "mlp."
    return Layer(
        input_norm=load(prefix + "input_layernorm.weight"),
        qkv=load.linear(attn + "q_proj.weight", attn + "k_proj.weight", attn + "v_proj.weight"),
        q_norm=load(attn + "q_norm.weight") if config.qk_norm else None,
        k_norm=load(attn + "k_norm.weight") if config.qk_norm else None,
        o=load.linear(attn + "o_proj.weight"),
        post_norm=load(prefix + "post_attention_layernorm.weight"),
        gate_up=load.linear(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        down=load.linear(mlp + "down_proj.weight"),
    )
