"""Taking a cached prefix up again where a model keeps more than KV for every token (book 8.3.3).

Recurrent layers keep a state, not a history: it can be taken up only where a snapshot was made. Sliding-window layers
keep a window: DeepSeek V4.1 drops it between turns and makes it again from the last tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from mini_engine.analysis.inputs import AnalysisError, whole
from mini_engine.analysis.units import MiB
from mini_engine.cache_key import CacheKey

KDA_SNAPSHOT_BYTES = 53.6 * MiB
"""One snapshot of the KDA layers' state on one card, with the layers split over eight cards (book 8.3.3; about)."""


def recovery_point(matched: int, snapshots: Iterable[int]) -> int:
    """Tokens that need no computing: up to the last snapshot that lies within the `matched` tokens; 0 without one."""
    whole(0, matched=matched)
    return max((position for position in snapshots if position <= matched), default=0)


def recomputed_tokens(matched: int, snapshots: Iterable[int]) -> int:
    """Matched tokens that are computed again all the same, from the recovery point on."""
    return matched - recovery_point(matched, snapshots)


def snapshot_positions(tokens: int, spacing: int) -> tuple[int, ...]:
    """After every `spacing` tokens of a context of `tokens`."""
    whole(0, tokens=tokens)
    whole(1, spacing=spacing)
    return tuple(range(spacing, tokens + 1, spacing))


@dataclass(frozen=True)
class SnapshotPlan:
    """Snapshots of a context at equal distance: bytes kept, and tokens computed again.

    mean_recomputed: over all lengths from 1 to the whole context at which the text may cease to match.
    """

    positions: tuple[int, ...]
    num_bytes: float
    worst_recomputed: int
    mean_recomputed: float


def snapshot_plan(tokens: int, spacing: int, snapshot_bytes: float = KDA_SNAPSHOT_BYTES) -> SnapshotPlan:
    """What snapshots every `spacing` tokens cost and spare. Half the spacing: twice the bytes, half the recomputing."""
    whole(1, tokens=tokens)
    positions = snapshot_positions(tokens, spacing)
    recomputed = [matched % spacing for matched in range(1, tokens + 1)]
    return SnapshotPlan(positions, len(positions) * snapshot_bytes, max(recomputed), sum(recomputed) / tokens)


@dataclass(frozen=True)
class StateLifetime:
    """Where a kind of state lives, and until when."""

    state: str
    place: str
    until: str
    num_layers: int | None = None


@dataclass(frozen=True)
class WindowedModel:
    """A causal encoder and a decoder with sliding windows beside a global KV cache.

    window: tokens a layer looks back. encoder_layers, decoder_layers: those with a window.
    The defaults are DeepSeek V4.1's as the book gives them: 40 windowed layers resident while it generates, 20 of them
    the decoder's. That the other 20 are the encoder's is what those two numbers leave.
    """

    window: int = 128
    encoder_layers: int = 20
    decoder_layers: int = 20

    def __post_init__(self) -> None:
        whole(1, window=self.window, encoder_layers=self.encoder_layers, decoder_layers=self.decoder_layers)

    @property
    def resident_layers(self) -> int:
        """Windowed layers whose state is on the accelerator during generation."""
        return self.encoder_layers + self.decoder_layers

    def lifetimes(self) -> tuple[StateLifetime, ...]:
        """Three states to be budgeted apart: what generation holds is not what the cache between turns holds."""
        return (
            StateLifetime("decoder window", "accelerator", "this turn's generation ends", self.decoder_layers),
            StateLifetime("encoder window", "host DRAM", "shortly after the turn", self.encoder_layers),
            StateLifetime("global KV", "prefix cache", "evicted, perhaps much later"),
        )

    def resume(self, cached: int, new: int, *, global_kv: bool, encoder_window: bool) -> Resumption:
        """What runs when `new` tokens follow a prefix of `cached` ones, by what of it is still there.

        Without the global KV the encoder window is of no use: the whole prefix is computed again.
        Raises AnalysisError where there is nothing to compute.
        """
        whole(0, cached=cached)
        whole(1, new=new)
        if not global_kv or cached == 0:
            path, replayed, exact = "recompute", cached, True
        elif encoder_window:
            path, replayed, exact = "continue", 0, True
        else:
            path, replayed, exact = "replay", min(self.window, cached), cached <= self.window
        return Resumption(path, replayed, new, min(self.window, cached + new), self.decoder_layers, exact)


@dataclass(frozen=True)
class Resumption:
    """Work of one prefill, in tokens.

    path: "continue" (all hit), "replay" (global KV only) or "recompute".
    encoder_replayed: tokens of the prefix that run through the encoder again. encoder_new: the new ones.
    decoder_replayed: last tokens of the whole prompt whose encoder output runs through the decoder's windowed layers,
        on every path: a full hit does not save it.
    encoder_exact: whether the encoder's window is the one an uninterrupted run would have, if what was kept was that.
        What a replay makes goes on into the new tokens' global KV. The decoder's window is made from the last tokens
        on every path, and is approximate as soon as the prompt is longer than they are.
    """

    path: str
    encoder_replayed: int
    encoder_new: int
    decoder_replayed: int
    decoder_layers: int
    encoder_exact: bool

    @property
    def encoder_tokens(self) -> int:
        return self.encoder_replayed + self.encoder_new

    @property
    def decoder_token_layers(self) -> int:
        """Tokens times layers of the decoder's replay: 2,560 on every longer prefill of V4.1."""
        return self.decoder_replayed * self.decoder_layers


def long_lived_share(window_share: Fraction = Fraction(1, 2), global_kept: Fraction = Fraction(1, 4)) -> Fraction:
    """Long-lived cache left when windowed state leaves it and global KV shrinks to `global_kept` of itself: 1/8.

    window_share: of the long-lived cache before. One half held for V4's own workload and cache policy, no other.
    """
    if not (0 <= window_share <= 1 and 0 <= global_kept <= 1):
        raise AnalysisError(f"shares lie in [0, 1], got {window_share} and {global_kept}")
    return (1 - window_share) * global_kept


@dataclass(frozen=True)
class PrefixIdentity:
    """All that must be the same for a state to be taken up: else it is another computation's (book 8.3.3).

    key: model, adapter, rule of positions, format of the state, salt. tokens: the prefix itself.
    first_position: where it stands.
    """

    key: CacheKey
    tokens: tuple[int, ...]
    first_position: int = 0


def why_not_resumable(kept: PrefixIdentity, wanted: PrefixIdentity, inputs_available: bool = True) -> tuple[str, ...]:
    """Reasons why the state kept for one prefix must not serve another; none: it may.

    inputs_available: whether the prefix's tokens (or input representations) are still there, without which nothing
        that was dropped can be replayed: a condition of replay and recompute when a tool returns, not of a full hit.
    """
    reasons = [
        f"{name.replace('_', ' ')}: {there!r} was kept, {here!r} is wanted"
        for name, there, here in (
            *zip(CacheKey._fields, kept.key, wanted.key, strict=True),
            ("first_position", kept.first_position, wanted.first_position),
        )
        if there != here
    ]
    if kept.tokens != wanted.tokens:
        pairs = enumerate(zip(kept.tokens, wanted.tokens, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(kept.tokens), len(wanted.tokens)))
        reasons.append(f"tokens: equal up to {same} only, of {len(kept.tokens)} kept and {len(wanted.tokens)} wanted")
    if not inputs_available:
        reasons.append("inputs: the prefix's tokens are gone, so its window cannot be replayed")
    return tuple(reasons)
