"""A checkpoint as one rank of a tensor-parallel group sees it: the same names, each tensor cut to the rank's part.

Only the part is read, so that a group's ranks together read the model about once, and none ever holds the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mini_engine.checkpoint import Checkpoint, check_target
from mini_engine.errors import ModelLoadError
from mini_engine.parallel import ROWS, ModelShard

if TYPE_CHECKING:
    import torch

    from mini_engine.linear import Int4Groups
    from mini_engine.tokenizer import Tokenizer


class ShardedCheckpoint:
    """See checkpoint.Checkpoint. 4-bit weights are read as numbers: a cut would go through their groups."""

    def __init__(self, checkpoint: Checkpoint, shard: ModelShard):
        self._whole = checkpoint
        self.shard = shard
        self.name, self.revision = checkpoint.name, checkpoint.revision
        self.config = shard.config
        self.eos_token_ids = checkpoint.eos_token_ids

    def names(self) -> Iterable[str]:
        return self._whole.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shard.part(name, self._whole.shape(name)).shape

    def read(self, name: str, out: torch.Tensor, rows: range | None = None, columns: range | None = None) -> None:
        if rows is not None or columns is not None:
            raise ModelLoadError(f"{name}: a rank's part is read whole, not by rows {rows} and columns {columns}")
        part = self.shard.part(name, self._whole.shape(name))
        check_target(name, part.shape, out)
        if part.axis is None:
            self._whole.read(name, out)
            return
        if sum(count for _, _, count in part.runs) < part.shape[part.axis]:
            out.zero_()
        for first, place, count in part.runs:
            target = out.narrow(part.axis, place, count)
            entries = range(first, first + count)
            if part.axis == ROWS:
                self._whole.read(name, target, rows=entries)
            else:
                self._whole.read(name, target, columns=entries)

    def holds_int4(self, name: str) -> bool:
        return False

    def read_int4(self, name: str) -> Int4Groups:
        raise ModelLoadError(f"{name} is cut: its 4-bit groups are not read")

    def tokenizer(self) -> Tokenizer:
        return self._whole.tokenizer()

    def close(self) -> None:
        """The whole checkpoint stays its owner's."""

    def __enter__(self) -> ShardedCheckpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
