"""How the order and the rewriting of a prompt decide what of it is found again (book 8.3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from mini_engine.analysis.capacity import shared_blocks
from mini_engine.analysis.inputs import AnalysisError, whole
from mini_engine.analysis.memory import kv_bytes
from mini_engine.config import ModelConfig

Part = tuple[str, int]
"""A part of a prompt: what it says (equal names, equal tokens) and how many tokens it has."""


def common_tokens(first: Sequence[Part], second: Sequence[Part]) -> int:
    """Tokens two prompts begin with in common, part by part. What is equal behind the first difference is worthless:
    every state there depends on all tokens before it."""
    return sum(part[1] for part, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def reusable_tokens(prompt: int, common: int, block_size: int = 16) -> int:
    """Tokens of a prompt found in the cache where the first `common` ones were computed before: whole blocks, and the
    last token of the prompt is always computed. 100 common tokens in blocks of 16 are 96."""
    return shared_blocks(prompt, common, block_size) * block_size


@dataclass(frozen=True)
class Turn:
    """What one way of going on costs, in tokens.

    reused: of the next prompt, found in the cache. computed: of the next prompt, prefilled.
    extra_computed, extra_generated: of a call before it, which writes a summary.
    context: length of the next prompt, which every later output token reads.
    """

    reused: int
    computed: int
    context: int
    extra_computed: int = 0
    extra_generated: int = 0

    @property
    def prefilled(self) -> int:
        """Tokens prefilled in all."""
        return self.computed + self.extra_computed

    def later_read_bytes(self, model: ModelConfig, outputs: int) -> int:
        """Bytes of this context's KV that `outputs` output tokens read, one round each. The outputs' own growing KV is
        the same whichever way is taken, and left out."""
        whole(0, outputs=outputs)
        return outputs * kv_bytes(model, self.context)


def append_turn(history: int, new: int, block_size: int = 16) -> Turn:
    """Add `new` tokens behind `history` ones that are all in the cache."""
    return _turn(history + new, history, block_size)


def rewrite_turn(history: int, new: int, unchanged: int = 0, block_size: int = 16) -> Turn:
    """The same with the history's text changed from token `unchanged` on: all behind it is computed again, even where
    the words are the same."""
    if unchanged > history:
        raise AnalysisError(f"{unchanged} unchanged tokens are more than the {history} there are")
    return _turn(history + new, unchanged, block_size)


def summary_turn(
    history: int, summary: int, new: int, unchanged: int = 0, instruction: int = 0, block_size: int = 16
) -> Turn:
    """Have the model put the history behind its first `unchanged` tokens into `summary` ones, then add `new` ones.

    Two prices: a call that reads the cached history and an `instruction`, and writes the summary; and a prefill of
    the next prompt, in which the summary stands at another place than where it was written.
    """
    if unchanged > history:
        raise AnalysisError(f"{unchanged} unchanged tokens are more than the {history} there are")
    call = _turn(history + instruction, history, block_size)
    turn = _turn(unchanged + summary + new, unchanged, block_size)
    return Turn(turn.reused, turn.computed, turn.context, call.computed, summary)


def _turn(prompt: int, common: int, block_size: int) -> Turn:
    reused = reusable_tokens(prompt, common, block_size)
    return Turn(reused, prompt - reused, prompt)
