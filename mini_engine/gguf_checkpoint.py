"""A GGUF file as a Checkpoint: llama.cpp's names and row order translated to Hugging Face's.

Source: llama.cpp's `convert_hf_to_gguf.py`, which permutes the rows of Q and K of `llama` models (not of `qwen3`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mini_engine.cache_key import file_revision
from mini_engine.checkpoint import check_target, check_tensors, part_of
from mini_engine.errors import ModelLoadError
from mini_engine.gguf import BLOCKS, GGUFFile, TensorInfo
from mini_engine.gguf_config import ROPE_FACTORS, read_config
from mini_engine.gguf_tokenizer import build_tokenizer, end_of_text_ids

if TYPE_CHECKING:
    import torch

    from mini_engine.linear import Int4Groups
    from mini_engine.tokenizer import Tokenizer

INT4_TYPES = ("Q4_0", "Q4_1")
_CHUNK_ELEMENTS = 1 << 18  # 1 MB of float32: temporaries stay in the caches
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_TOP["output.weight"] = "lm_head.weight"
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint:
    """See checkpoint.Checkpoint. Raises ModelLoadError naming the file and the cause."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        try:
            self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        metadata = self._file.metadata
        self.name = str(metadata.get("general.name") or path.stem)
        self.revision = file_revision([path])
        try:
            self.config = read_config(self._file)
            self.eos_token_ids = end_of_text_ids(metadata)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from None
        self._tensors = {_hf_name(name): info for name, info in self._file.tensors.items() if name != ROPE_FACTORS}
        check_tensors(str(path), self.config, {name: info.shape for name, info in self._tensors.items()})

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise ModelLoadError(f"{self._file.path}: there is no tensor {name}")
        return self._tensors[name]

    def read(self, name: str, out: torch.Tensor, rows: range | None = None, columns: range | None = None) -> None:
        import torch

        info = self._info(name)
        rows, columns = part_of(info.shape, rows, columns)
        check_target(name, (len(rows), len(columns)) if len(info.shape) > 1 else info.shape, out)
        # On one thread: the slices are so small that on a busy machine waiting for a second one takes far longer than
        # the work itself (measured: 10 s in place of 2 s).
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._read_slices(info, self._permuted_heads(name), out, rows, columns)
        finally:
            torch.set_num_threads(threads)
        self._file.release(info)

    def _read_slices(self, info: TensorInfo, heads: int, out: torch.Tensor, rows: range, columns: range) -> None:
        """heads: how many heads the rows are permuted within, 0 for rows in order.

        Columns are read by whole quantised blocks, and cut to the ones asked for afterwards.
        """
        import torch

        from mini_engine.gguf_quants import dequantize

        raw = self._file.raw(info)
        if out.dim() == 1:
            out.copy_(dequantize(torch.from_numpy(raw.copy()), info.type_name)[0])
            return
        block, block_bytes = BLOCKS[info.type_name]
        first = columns.start // block
        raw = raw[rows.start : rows.stop, first * block_bytes : -(-columns.stop // block) * block_bytes]
        wanted = slice(columns.start - first * block, columns.stop - first * block)
        # [units, rows of a unit, columns]: a unit is a head where rows are permuted, else a single row
        unit = info.shape[0] // heads if heads else 1
        target = out.unflatten(0, (-1, unit))
        step = max(1, _CHUNK_ELEMENTS // (unit * info.shape[1]))
        for start in range(0, target.shape[0], step):
            end = min(start + step, target.shape[0])
            # The copy makes torch the owner: a tensor must not outlive the map it points into.
            part = torch.from_numpy(raw[start * unit : end * unit].copy())
            values = dequantize(part, info.type_name)[:, wanted].unflatten(0, (end - start, unit))
            target[start:end].copy_(_rotary_halves(values) if heads else values)

    def holds_int4(self, name: str) -> bool:
        return self._info(name).type_name in INT4_TYPES

    def read_int4(self, name: str) -> Int4Groups:
        import torch

        from mini_engine.gguf_quants import int4_groups
        from mini_engine.linear import Int4Groups

        info = self._info(name)
        if info.type_name not in INT4_TYPES:
            raise ModelLoadError(f"{self._file.path}: {name} is {info.type_name}, not one of {', '.join(INT4_TYPES)}")
        parts = int4_groups(torch.from_numpy(self._file.raw(info).copy()), info.type_name)
        self._file.release(info)
        if heads := self._permuted_heads(name):
            return Int4Groups(*(_rotary_halves(part.unflatten(0, (heads, -1))).flatten(0, 1) for part in parts))
        return Int4Groups(*parts)

    def _permuted_heads(self, name: str) -> int:
        """Number of heads whose rows the converter permuted, 0 for a tensor it left alone."""
        if self.config.architecture != "llama":
            return 0
        if name.endswith("q_proj.weight"):
            return self.config.num_attention_heads
        return self.config.num_key_value_heads if name.endswith("k_proj.weight") else 0

    def tokenizer(self) -> Tokenizer:
        try:
            tokenizer = build_tokenizer(self._file.metadata)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._file.path}: {error}") from None
        if tokenizer.vocab_size > self.config.vocab_size:
            raise ModelLoadError(
                f"{self._file.path}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding "
                f"{self.config.vocab_size} rows"
            )
        return tokenizer

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> GGUFCheckpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _rotary_halves(rows: torch.Tensor) -> torch.Tensor:
    """Undo the converter's permutation: [heads, pairs x 2, columns], the two of a pair side by side (as ggml rotates
    them), to two halves one after the other (as Hugging Face rotates them)."""
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _hf_name(name: str) -> str:
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name):
        layer, part, suffix = match.groups()
        if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{suffix}"
    return _TOP.get(name, name)  # an unknown name stays as it is, for the message that refuses it
