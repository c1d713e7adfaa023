"""A Llama or Qwen3 decoder: weights as plain tensors, the forward pass as one short function.

    tokens [T] -> embed -> layers x (norm, attention, add, norm, SwiGLU, add) -> norm of the R rows to draw from
    -> logits [R, vocab]

Tokens of all sequences lie one after the other; only attention knows where one ends. Q, K and V are one matrix, gate
and up another, so that a decode step makes four matrix products a layer instead of seven.

Source: Llama (Touvron et al. 2023), Qwen3 (QK-norm), rotary embedding in Hugging Face's half-split layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mini_engine.batch import Batch
from mini_engine.checkpoint import Checkpoint
from mini_engine.config import ModelConfig
from mini_engine.kv_cache import KVCache
from mini_engine.linear import INT4_ROWS, HalfLinear, Int4Groups, Int4Linear, Linear
from mini_engine.ops import Attention, Ops


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
    """The model on one device. `forward` has no state of its own: the KV cache is passed in.

    int4: use a GGUF file's 4-bit weights as they are where few rows are multiplied (see `linear.py`; CPU only).
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int | None = None,
        int4: bool = False,
    ):
        self.config = config
        self.scale = 1 / math.sqrt(config.head_dim)
        load = _Loader(checkpoint, dtype, device, int4)
        self.embedding = load("model.embed_tokens.weight")
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

    def forward(self, batch: Batch, kv: KVCache, attention: Attention, ops: Ops) -> torch.Tensor:
        """Logits [R, vocab] float32 of the rows `batch.logits_indices`; writes K and V of all T tokens into `kv`.

        attention: of this batch; ops: the steps between the matrix products, in torch or as Triton kernels.
        """
        config = self.config
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        rotate = ops.rotary(self.cos_sin, batch.positions)
        x = F.embedding(batch.input_ids, self.embedding)
        for i, layer in enumerate(self.layers):
            h = ops.rms_norm(x, layer.input_norm, config.rms_norm_eps)
            qkv = layer.qkv(h).view(len(x), heads + 2 * kv_heads, dim)
            qk, v = qkv.split((heads + kv_heads, kv_heads), 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = ops.qk_norm(qk, layer.q_norm, layer.k_norm, heads, config.rms_norm_eps)
            q, k = rotate(qk).split((heads, kv_heads), 1)
            ops.write(kv, i, k, v, batch.slot_mapping)
            out = attention(q, *kv.layers[i]).out
            x = x + layer.o(out.flatten(1).to(x.dtype))
            h = ops.rms_norm(x, layer.post_norm, config.rms_norm_eps)
            x = x + layer.down(ops.swiglu(layer.gate_up(h)))
        x = ops.rms_norm(x[batch.logits_indices], self.norm, config.rms_norm_eps)
        return self.head(x).float()


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each of the head_dim / 2 pairs, with Llama 3's scaling applied. float32.

    Source: Su et al. 2021 for theta^(-2i/D); Llama 3.1 reference code for the scaling.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent
    if config.rope_factors is not None:
        return frequency / torch.tensor(config.rope_factors)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return frequency * (ramp + (1 - ramp) / scaling.factor)


def rotary_table(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[length, 2, D]: the cosine, and the sine with its first half negated, of every position."""
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return table.to(dtype).to(device)


class _Loader:
    """Reads tensors straight to where they stay: no second copy of the model exists at any time."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, int4: bool):
        self.checkpoint, self.dtype, self.device, self.int4 = checkpoint, dtype, device, int4
        self.has_int4 = False

    def __call__(self, *names: str) -> torch.Tensor:
        """One tensor, or several stacked by rows."""
        rows = [self.checkpoint.shape(name)[0] for name in names]
        out = torch.empty((sum(rows), *self.checkpoint.shape(names[0])[1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, out.split(rows), strict=True):
            self.checkpoint.read(name, part)
        return out

    def linear(self, *names: str) -> Linear:
        """A matrix, or several stacked by rows; in 4 bits as well if all of them are."""
        weight = self(*names)
        if not self.int4 or not all(map(self.checkpoint.holds_int4, names)) or len(weight) % INT4_ROWS:
            return Linear(weight)
        self.has_int4 = True
        groups = [self.checkpoint.read_int4(name) for name in names]
        return Int4Linear(weight, Int4Groups(*(torch.cat(parts) for parts in zip(*groups, strict=True))))


def _load_layer(load: _Loader, config: ModelConfig, prefix: str) -> Layer:
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
