"""A Hugging Face directory as a Checkpoint: config.json, tokenizer.json, safetensors (one file, or shards by an index).

Parsing and checking the safetensors header is the `safetensors` library's work. A shard is opened anew for each read,
so that at no time more than one tensor's pages of the file are mapped.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from mini_engine.cache_key import file_revision
from mini_engine.checkpoint import EMBEDDING, HEAD, check_target, check_tensors, part_of
from mini_engine.config import ModelConfig
from mini_engine.errors import ModelLoadError
from mini_engine.hf_tokenizer import load_tokenizer, read_json

if TYPE_CHECKING:
    import torch

    from mini_engine.linear import Int4Groups
    from mini_engine.tokenizer import Tokenizer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DERIVED = "rotary_emb.inv_freq"  # a buffer old checkpoints carry; it follows from the config


class SafetensorsCheckpoint:
    """See checkpoint.Checkpoint. Raises ModelLoadError naming the file and the cause."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.name = directory.name
        if not (directory / "config.json").is_file():
            raise ModelLoadError(f"{directory}: no config.json; {_contents(directory)}")
        config = read_json(directory / "config.json")
        try:
            self.config = ModelConfig.from_hf(config)
        except ModelLoadError as error:
            raise ModelLoadError(f"{directory / 'config.json'}: {error}") from None
        except ValueError as error:  # text where a number belongs
            raise ModelLoadError(f"{directory / 'config.json'}: {error}") from None
        self._shards, self._shapes = _headers(directory)
        self.revision = file_revision(self._shards.values())
        if self.config.tie_word_embeddings and HEAD in self._shapes:
            self._drop_tied_head()
        check_tensors(str(directory), self.config, self._shapes)
        self.eos_token_ids = _declared_eos(directory, config)

    def _drop_tied_head(self) -> None:
        """Some checkpoints store the tied matrix twice. Two different ones would make the result a matter of taste."""
        import torch

        alike = self._shapes[HEAD] == self._shapes.get(EMBEDDING)
        if not alike or not torch.equal(self._load(HEAD), self._load(EMBEDDING)):
            raise ModelLoadError(
                f"{self._directory}: config.json ties the embeddings, but {HEAD} and {EMBEDDING} differ; set "
                f"tie_word_embeddings to false if both are meant"
            )
        del self._shapes[HEAD]

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ModelLoadError(f"{self._directory}: there is no tensor {name}")
        return self._shapes[name]

    def read(self, name: str, out: torch.Tensor, rows: range | None = None, columns: range | None = None) -> None:
        shape = self.shape(name)
        if rows is None and columns is None:
            check_target(name, shape, out)
            out.copy_(self._load(name))
            return
        rows, columns = part_of(shape, rows, columns)
        check_target(name, (len(rows), len(columns)), out)
        out.copy_(self._load(name, (slice(rows.start, rows.stop), slice(columns.start, columns.stop))))

    def _load(self, name: str, part: tuple[slice, slice] | None = None) -> torch.Tensor:
        path = self._shards[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name) if part is None else file.get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: {name} cannot be read: {error}") from None

    def holds_int4(self, name: str) -> bool:
        return False

    def read_int4(self, name: str) -> Int4Groups:
        raise ModelLoadError(f"{name} is not held in 4-bit groups")

    def tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self._directory)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise ModelLoadError(
                f"{self._directory}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding "
                f"{self.config.vocab_size} rows"
            )
        return tokenizer

    def close(self) -> None:
        """Nothing stays open between reads."""

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _headers(directory: Path) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """(file of each tensor, shape of each tensor), from the headers alone."""
    shards: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _shard_paths(directory):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                    if name.endswith(_DERIVED):
                        continue
                    if name in shards:
                        raise ModelLoadError(f"{path}: the tensor {name} is in {shards[name].name} too")
                    part = file.get_slice(name)
                    if 0 in part.get_shape():
                        continue  # no element, so nothing to ignore: shared experts where there are none
                    _check_dtype(path, name, part.get_dtype())
                    shards[name], shapes[name] = path, tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: truncated or corrupt safetensors: {error}") from None
    return shards, shapes


def _check_dtype(path: Path, name: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ModelLoadError(
            f"{path}: {name} has dtype {dtype}, which is not supported; {', '.join(DTYPES)} are: use unquantised "
            f"weights or a GGUF file"
        )


def _shard_paths(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        if (directory / SINGLE).is_file():
            return [directory / SINGLE]
        raise ModelLoadError(f"{directory}: neither {SINGLE} nor {INDEX}; {_contents(directory)}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelLoadError(f"{index}: no weight_map from tensors to files")
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if not (directory / shard).is_file()]:
        raise ModelLoadError(
            f"{index}: {len(missing)} of {len(shards)} shards are missing, the first is {missing[0]}; is the download "
            f"complete?"
        )
    return [directory / shard for shard in shards]


def _declared_eos(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    """generation_config.json's ids, else config.json's: one number or a list."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = config.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(index, int) for index in ids):
        raise ModelLoadError(f"{directory}: eos_token_id must be whole numbers, got {ids!r:.60}")
    return frozenset(ids)


def _contents(directory: Path) -> str:
    """What a directory has instead, for the error."""
    ggufs, pickles = sorted(directory.glob("*.gguf")), sorted(directory.glob("*.bin"))
    if ggufs:
        return f"there is {ggufs[0].name}: give that file's path"
    if pickles:
        return f"there is {pickles[0].name}: pickled weights are not loaded, use the safetensors of the model"
    return "a model directory holds config.json, tokenizer.json and *.safetensors"
