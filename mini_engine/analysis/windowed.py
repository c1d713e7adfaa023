"""A toy stack of sliding-window layers, to see that replaying one window does not bring back the true state.

    state of layer l   its inputs at the last window − 1 positions: all that the next token looks back at
    reach              layer l's state depends on l · (window − 1) tokens before now

One layer's state is its window of the tokens themselves, so replaying a window restores it. The second layer's inputs
are the first one's outputs, and the earliest of those looked back at tokens from before the replay: after a restart
they come out different, and so on upwards (book 8.3.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mini_engine.analysis.inputs import AnalysisError, whole

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class WindowedStack:
    """`layers` layers of softmax attention over the last `window` positions (a token's own among them), no weights
    shared. mixing [layers, 3, width, width]: query, key and value matrices."""

    window: int
    mixing: Array

    @classmethod
    def random(cls, layers: int, window: int, width: int = 8, seed: int = 0) -> WindowedStack:
        whole(1, layers=layers, window=window, width=width)
        return cls(window, np.random.default_rng(seed).normal(0, width**-0.5, (layers, 3, width, width)))

    @property
    def reach(self) -> int:
        """Last tokens that the whole state depends on, and that a replay has to begin with: layers × (window − 1)."""
        return len(self.mixing) * (self.window - 1)

    def state(self, tokens: Array) -> Array:
        """What the stack holds after the tokens [length, width]: [layers, window − 1, width], each layer's last inputs.

        Raises AnalysisError for fewer tokens than a window has, less one.
        """
        if len(tokens) < self.window - 1:
            raise AnalysisError(f"{len(tokens)} tokens do not fill a window of {self.window} less the next token")
        kept = []
        inputs = tokens
        for query, key, value in self.mixing:
            kept.append(inputs[len(inputs) - self.window + 1 :])
            inputs = inputs + self._attend(inputs @ query, inputs @ key, inputs @ value)
        return np.stack(kept)

    def replayed_state(self, tokens: Array, replay: int) -> Array:
        """The state after only the last `replay` tokens, from nothing: what is recovered once the rest was dropped."""
        whole(self.window - 1, replay=replay)
        return self.state(tokens[max(0, len(tokens) - replay) :])

    def replay_error(self, tokens: Array, replay: int) -> Array:
        """Largest difference between true and replayed state in each layer, [layers]. The first layer's is 0."""
        difference = np.abs(self.state(tokens) - self.replayed_state(tokens, replay))
        return difference.reshape(len(difference), -1).max(axis=1, initial=0.0)

    def _attend(self, query: Array, key: Array, value: Array) -> Array:
        """[length, width] each. Row by row, so that a token's result is the same however many rows come before it."""
        rows = []
        for i in range(len(query)):
            seen = slice(max(0, i - self.window + 1), i + 1)
            scores = key[seen] @ query[i]
            weights = np.exp(scores - scores.max())
            rows.append(weights @ value[seen] / weights.sum())
        return np.stack(rows)
