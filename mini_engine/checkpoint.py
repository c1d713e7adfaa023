"""What a loader sees of a model on disk, whatever its file format, and the check that its tensors are the right ones.

Names are those of Hugging Face checkpoints: `model.layers.0.self_attn.q_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from mini_engine.config import ModelConfig
from mini_engine.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

    from mini_engine.linear import Int4Groups
    from mini_engine.tokenizer import Tokenizer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NAMES_SHOWN = 3


class Checkpoint(Protocol):
    """An opened model. Its tensors have been checked against its config; none has been read.

    name: what to show a person. revision: another one when the weight files are replaced.
    eos_token_ids: every token that ends a text or a turn.
    """

    name: str
    revision: str
    config: ModelConfig
    eos_token_ids: frozenset[int]

    def names(self) -> Iterable[str]:
        """The tensors the model needs, no more: tied embeddings have no `lm_head.weight`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in elements. Raises ModelLoadError for a name that is not one of `names()`."""

    def read(self, name: str, out: torch.Tensor, rows: range | None = None, columns: range | None = None) -> None:
        """Write the tensor into `out`, of the same shape, any float dtype and any strides (a slice of a fused one).

        rows, columns: only those of a matrix, a run of either; nothing else is read from the file. Rows of query and
        key projections are asked for by whole heads.
        """

    def holds_int4(self, name: str) -> bool:
        """Whether the file holds the tensor in 4-bit groups of 32."""

    def read_int4(self, name: str) -> Int4Groups:
        """A matrix as the 4-bit groups the file holds it in; see `holds_int4`."""

    def tokenizer(self) -> Tokenizer: ...

    def close(self) -> None: ...

    def __enter__(self) -> Checkpoint: ...

    def __exit__(self, *exc: object) -> None: ...


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a model and its shape, [outputs, inputs] for matrices."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        layer = _norms(config) | _attention(config) | _mlp(config, index)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def _norms(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (config.hidden_size,) for name in ("input_layernorm", "post_attention_layernorm")}


def _attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"o_proj": (hidden, config.o_size)}
    if mla := config.mla:
        if mla.q_lora_rank is None:
            shapes["q_proj"] = (config.q_size, hidden)
        else:
            shapes |= {"q_a_proj": (mla.q_lora_rank, hidden), "q_a_layernorm": (mla.q_lora_rank,)}
            shapes["q_b_proj"] = (config.q_size, mla.q_lora_rank)
        up = config.num_attention_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        shapes |= {"kv_a_proj_with_mqa": (mla.cached_dim, hidden), "kv_a_layernorm": (mla.kv_lora_rank,)}
        shapes["kv_b_proj"] = (up, mla.kv_lora_rank)
    else:
        widths = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        shapes |= {name: (width, hidden) for name, width in widths.items()}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _mlp(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    moe, hidden = config.moe, config.hidden_size
    if moe is None or not config.is_moe_layer(layer):
        return _swiglu("mlp", hidden, config.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (moe.n_routed_experts, hidden)}
    for expert in range(moe.n_routed_experts):
        shapes |= _swiglu(f"mlp.experts.{expert}", hidden, moe.moe_intermediate_size)
    if moe.n_shared_experts:
        shapes |= _swiglu("mlp.shared_experts", hidden, moe.shared_intermediate_size)
    return shapes


def _swiglu(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def check_tensors(source: str, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the tensors a checkpoint has with those its config asks for.

    Raises ModelLoadError for missing tensors, wrong shapes, and tensors the model would ignore (a bias changes the
    result, so leaving it out would be silently wrong).
    """
    if config.num_hidden_layers > len(found):  # before a corrupt count makes a list of billions
        raise ModelLoadError(
            f"{source}: {config.num_hidden_layers} layers in its config, but only {len(found)} tensors"
        )
    if config.moe and config.num_moe_layers and config.moe.n_routed_experts > len(found):
        raise ModelLoadError(
            f"{source}: {config.moe.n_routed_experts} experts in its config, but only {len(found)} tensors"
        )
    expected = expected_shapes(config)
    if missing := [name for name in expected if name not in found]:
        raise ModelLoadError(f"{source}: {_listed(missing)} missing; is the download complete?")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelLoadError(f"{source}: {name} has shape {list(found[name])}, its config asks for {list(shape)}")
    if extra := [name for name in found if name not in expected]:
        raise ModelLoadError(
            f"{source}: {_listed(extra)} not part of a {config.architecture} with {config.num_hidden_layers} layers; "
            f"ignoring it would change the result"
        )


def part_of(shape: tuple[int, ...], rows: range | None, columns: range | None) -> tuple[range, range]:
    """The rows and columns of a tensor that are meant: all where None is given. A vector is a column of rows."""
    return rows or range(shape[0]), columns or range(shape[1] if len(shape) > 1 else 1)


def check_target(name: str, shape: tuple[int, ...], out: torch.Tensor) -> None:
    if tuple(out.shape) != shape:
        raise ModelLoadError(f"{name} has shape {list(shape)}, the tensor to read it into has {list(out.shape)}")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    verb = "is" if len(names) == 1 else "are"
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "") + f" {verb}"
