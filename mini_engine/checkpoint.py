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

    def read(self, name: str, out: torch.Tensor) -> None:
        """Write the tensor into `out`, of the same shape, any float dtype and any strides (a slice of a fused one)."""

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
    hidden, inner = config.hidden_size, config.intermediate_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (config.q_size, hidden),
        "self_attn.k_proj.weight": (config.kv_size, hidden),
        "self_attn.v_proj.weight": (config.kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, config.q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def check_tensors(source: str, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the tensors a checkpoint has with those its config asks for.

    Raises ModelLoadError for missing tensors, wrong shapes, and tensors the model would ignore (a bias changes the
    result, so leaving it out would be silently wrong).
    """
    if config.num_hidden_layers > len(found):  # before a corrupt count makes a list of billions
        raise ModelLoadError(
            f"{source}: {config.num_hidden_layers} layers in its config, but only {len(found)} tensors"
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


def check_target(name: str, shape: tuple[int, ...], out: torch.Tensor) -> None:
    if tuple(out.shape) != shape:
        raise ModelLoadError(f"{name} has shape {list(shape)}, the tensor to read it into has {list(out.shape)}")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    verb = "is" if len(names) == 1 else "are"
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "") + f" {verb}"
