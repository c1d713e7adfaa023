"""A DeepSeek-V2 decoder: multi-head latent attention, and experts in place of most MLPs. See `model.py` for the rest.

    h [T, hidden] -> queries [T, heads, nope + rope]        by a latent of their own in large models (q_lora_rank)
                  -> latent [T, r] normed, key [T, rope]    what is cached, for all heads: r + rope elements a token
    attention, absorbed or naive by the number of new tokens (`latent_attention.py`) -> o

Equal to transformers' DeepseekV2ForCausalLM on tiny random models (tests/test_mla.py). The weights of DeepSeek-V2-Lite,
31 GB in bfloat16, load by the same path; that could not be tried without a network. Its published config.json is read
in the tests, and the tensors that follow from it have the published names and add up to the published size.

Source: DeepSeek-V2 (DeepSeek-AI 2024); softmax scale and rotary layout as in its `modeling_deepseek.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mini_engine.batch import Batch
from mini_engine.checkpoint import EMBEDDING, HEAD, Checkpoint
from mini_engine.groups import Group, LocalGroup
from mini_engine.latent_attention import absorbed_query, half_split, naive_attention, values_of
from mini_engine.layer_attention import LayerAttention
from mini_engine.linear import Linear
from mini_engine.model_config import MLAShape, ModelConfig, YarnRopeScaling
from mini_engine.moe import MLP, MoE
from mini_engine.ops import Ops
from mini_engine.rotary import rotary_table
from mini_engine.vocab_parallel import VocabParallelEmbedding
from mini_engine.weight_loader import WeightLoader

# DeepSeek's own code and transformers leave the inner norms at this, whatever rms_norm_eps is.
INNER_NORM_EPS = 1e-6


@dataclass
class MLALayer:
    """One decoder layer. Matrices are [out, in].

    q: from the hidden state, or from q_norm of q_a's latent. kv_a: rows of the latent, then of the rotated key.
    up [heads, nope + v, r]: kv_b_proj by heads. Rotated rows of q and kv_a are in this engine's order (`half_split`).
    """

    input_norm: torch.Tensor
    q_a: Linear | None
    q_norm: torch.Tensor | None
    q: Linear
    kv_a: Linear
    kv_norm: torch.Tensor
    up: torch.Tensor
    o: Linear
    post_norm: torch.Tensor
    mlp: MLP | MoE


class Naive(NamedTuple):
    """A sequence in naive form: `tokens` of the batch, after `context` tokens."""

    row: int
    tokens: slice
    context: int


class Absorbed(NamedTuple):
    """Sequences in absorbed form: their tokens, and their attention."""

    tokens: torch.Tensor
    attention: LayerAttention


class Split(NamedTuple):
    """Which sequences of a step take which form. absorbed: None where all of them are of one form."""

    absorbed: Absorbed | None
    naive: list[Naive]


class MLADecoder:
    """The model on one device; see `model.Decoder`, which has the same methods.

    checkpoint, config: of this rank's part. naive_above: chunks with more new tokens take the naive form; infinity
    switches it off.
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
        assert config.mla is not None, "the runner gives other models to Decoder"
        self.config, self.mla = config, config.mla
        self.group = group or LocalGroup.create(1)[0]
        self.naive_above = self.mla.naive_break_even
        self.scale = softmax_scale(config, self.mla)
        load = WeightLoader(checkpoint, dtype, device, int4)
        self.embedding = load(EMBEDDING)
        self.embed = VocabParallelEmbedding(self.embedding, self.group)
        self.layers = [_load_layer(load, config, self.mla, i) for i in range(config.num_hidden_layers)]
        self.norm = load("model.norm.weight")
        self.head = Linear(self.embedding if config.tie_word_embeddings else load(HEAD))
        self.cos_sin = rotary_table(config, max_model_len or config.max_position_embeddings, dtype, device)

    def weight_tensors(self) -> list[torch.Tensor]:
        """Every weight held, once."""
        tensors = [self.embedding]
        for part in self._parts():
            tensors += [part] if isinstance(part, torch.Tensor) else part.tensors()
        return list({tensor.data_ptr(): tensor for tensor in tensors}.values())

    def read_bytes(self) -> int:
        """Bytes of weights that a decode step of one sequence reads: of the experts, those of one token."""
        return sum(part.nbytes if isinstance(part, torch.Tensor) else part.read_bytes() for part in self._parts())

    def _parts(self) -> list[torch.Tensor | Linear | MLP | MoE]:
        """All weights but the input embedding."""
        parts = [part for layer in self.layers for part in vars(layer).values() if part is not None]
        return [*parts, self.norm, self.head]

    def forward(self, batch: Batch, attention: LayerAttention, ops: Ops) -> torch.Tensor:
        """Logits [R, vocab] float32 of the rows `batch.logits_indices`, of this rank's part of the vocabulary.

        attention: of this batch, which stores the latents of all T tokens.
        """
        eps, all_reduce = self.config.rms_norm_eps, self.group.all_reduce
        split = self._split(batch, attention)
        rotate = ops.rotary(self.cos_sin, batch.positions)
        x = self.embed(batch.input_ids)
        for i, layer in enumerate(self.layers):
            h = ops.rms_norm(x, layer.input_norm, eps)
            q, k = self._project(layer, h, rotate, ops)
            out = self._attend(i, layer, q, k, split, attention)
            x = x + all_reduce(layer.o(out.flatten(1)))
            h = ops.rms_norm(x, layer.post_norm, eps)
            x = x + all_reduce(layer.mlp(h, ops))
        x = ops.rms_norm(x[batch.logits_indices], self.norm, eps)
        return self.head(x).float()

    def _split(self, batch: Batch, attention: LayerAttention) -> Split:
        slices, first = [], 0
        for num_new in batch.query_lens:
            slices.append(slice(first, first + num_new))
            first += num_new
        is_naive = [num_new > self.naive_above for num_new in batch.query_lens]
        naive = [Naive(row, slices[row], batch.context_lens[row]) for row, yes in enumerate(is_naive) if yes]
        short = [row for row, yes in enumerate(is_naive) if not yes]
        if not naive or not short:
            return Split(None, naive)
        tokens = torch.cat([torch.arange(slices[row].start, slices[row].stop) for row in short])
        return Split(Absorbed(tokens.to(batch.input_ids.device), attention.only(short)), naive)

    def _project(
        self, layer: MLALayer, h: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor], ops: Ops
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, heads, nope + rope], and what the cache keeps, k [T, 1, r + rope]; both rotated."""
        mla = self.mla
        latent, k_rope = layer.kv_a(h).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=1)
        latent = ops.rms_norm(latent, layer.kv_norm, INNER_NORM_EPS)
        if layer.q_a is not None and layer.q_norm is not None:
            h = ops.rms_norm(layer.q_a(h), layer.q_norm, INNER_NORM_EPS)
        q_nope, q_rope = (
            layer.q(h).unflatten(1, (-1, mla.qk_head_dim)).split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=2)
        )
        q_rope, k_rope = rotate(torch.cat((q_rope, k_rope[:, None]), dim=1)).split((q_rope.shape[1], 1), dim=1)
        return torch.cat((q_nope, q_rope), dim=2), torch.cat((latent[:, None], k_rope), dim=2)

    def _attend(
        self, index: int, layer: MLALayer, q: torch.Tensor, k: torch.Tensor, split: Split, attention: LayerAttention
    ) -> torch.Tensor:
        """[T, own heads, v], each sequence in its form; stores k."""
        if not split.naive:
            return self._absorbed(index, layer, q, k, attention)
        attention.store(index, k, k[..., : self.mla.kv_lora_rank])
        own = self._own_heads(layer)
        out = q.new_empty(len(q), own.stop - own.start, self.mla.v_head_dim)
        for row, tokens, context in split.naive:
            latents = attention.kv.rounded(k[tokens, 0])
            if context:
                latents = torch.cat((attention.context(index, row)[0][0].to(k.dtype), latents))
            out[tokens] = naive_attention(q[tokens, own], latents, layer.up[own], self.mla, self.scale)
        if split.absorbed is not None:
            rows = split.absorbed.tokens
            out[rows] = self._absorbed(index, layer, q[rows], k[rows], split.absorbed.attention)
        return out

    def _absorbed(
        self, index: int, layer: MLALayer, q: torch.Tensor, k: torch.Tensor, attention: LayerAttention
    ) -> torch.Tensor:
        query = absorbed_query(q, layer.up, self.mla)
        latents = attention(index, query, k, k[..., : self.mla.kv_lora_rank])
        return values_of(latents.to(q.dtype), layer.up[self._own_heads(layer)], self.mla)

    def _own_heads(self, layer: MLALayer) -> slice:
        """Of the query heads computed here, those whose results `o` takes: all, unless the query projection is
        replicated within a context-parallel group, whose ranks' heads then lie here in rank order."""
        own = layer.o.weight.shape[1] // self.mla.v_head_dim
        first = self.group.rank % (len(layer.up) // own) * own
        return slice(first, first + own)


def softmax_scale(config: ModelConfig, mla: MLAShape) -> float:
    """1 / sqrt(width of a query head), times YaRN's temperatures of queries and keys.

    DeepSeek applies them here in full, and to cosine and sine only where mscale and mscale_all_dim differ.
    """
    scaling = config.rope_scaling
    return mla.qk_head_dim**-0.5 * (scaling.scale_factor if isinstance(scaling, YarnRopeScaling) else 1.0)


def _load_layer(load: WeightLoader, config: ModelConfig, mla: MLAShape, index: int) -> MLALayer:
    prefix = f"model.layers.{index}."
    attn, mlp = prefix + "self_attn.", prefix + "mlp."
    compressed = mla.q_lora_rank is not None
    q = load(attn + ("q_b_proj.weight" if compressed else "q_proj.weight"))
    kv_a = load(attn + "kv_a_proj_with_mqa.weight")
    for rows in (q.unflatten(0, (-1, mla.qk_head_dim))[:, mla.qk_nope_head_dim :], kv_a[mla.kv_lora_rank :]):
        rows.copy_(half_split(rows))
    return MLALayer(
        input_norm=load(prefix + "input_layernorm.weight"),
        q_a=load.linear(attn + "q_a_proj.weight") if compressed else None,
        q_norm=load(attn + "q_a_layernorm.weight") if compressed else None,
        q=Linear(q),
        kv_a=Linear(kv_a),
        kv_norm=load(attn + "kv_a_layernorm.weight"),
        up=load(attn + "kv_b_proj.weight").unflatten(0, (-1, mla.qk_nope_head_dim + mla.v_head_dim)),
        o=load.linear(attn + "o_proj.weight"),
        post_norm=load(prefix + "post_attention_layernorm.weight"),
        mlp=MoE.load(load, config.moe, mlp) if config.moe and config.is_moe_layer(index) else MLP.load(load, mlp),
    )
