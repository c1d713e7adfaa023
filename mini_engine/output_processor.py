"""From drawn tokens to what a caller sees: text, finish reasons, metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mini_engine.detokenizer import Detokenizer
from mini_engine.metrics import RequestMetrics
from mini_engine.sequence import Sequence

if TYPE_CHECKING:
    from mini_engine.sampler import TokenLogprobs
    from mini_engine.tokenizer import Tokenizer


@dataclass(eq=False)
class CompletionOutput:
    """One output of a request, growing from step to step.

    text, token_ids: all of it so far. Text is held back while it may still become part of a longer character or of a
        stop string. A stop string is not part of the text; its tokens are part of token_ids.
    finish_reason: "stop", "length", "abort", or None while it runs.
    logprobs: one dictionary a token, if asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(eq=False)
class RequestOutput:
    """The record of one request, updated in place by every step that advances it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False


class RequestState:
    """A request in flight: its sequences (one, or `n` after the prefill) and the record that is filled in."""

    def __init__(self, seq: Sequence, prompt: str | None, tokenizer: Tokenizer, now: float):
        params = seq.params
        self.sequences = {0: seq}
        outputs = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        self.record = RequestOutput(seq.request_id, prompt, list(seq.token_ids), outputs, RequestMetrics(arrival=now))
        self.detokenizers = [
            Detokenizer(tokenizer, stop=tuple(params.stop or ()), min_tokens=params.min_tokens) for _ in outputs
        ]

    def scheduled(self, now: float) -> None:
        if self.record.metrics.scheduled is None:
            self.record.metrics.scheduled = now

    def begin_step(self, now: float) -> None:
        """Note the time of the tokens to come."""
        if self.record.outputs[0].finish_reason is None:
            self.record.metrics.token_times.append(now)

    def append(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Add a token to its output; True if the text has reached a stop string."""
        self.sequences[seq.index] = seq
        output, detokenizer = self.record.outputs[seq.index], self.detokenizers[seq.index]
        output.token_ids.append(token)
        if output.logprobs is not None and logprobs is not None:
            output.logprobs.append(logprobs)
        output.text += detokenizer.add([token])
        return detokenizer.finished_by_stop is not None

    def close(self, seq: Sequence, now: float) -> None:
        """Settle the output of a sequence that has finished, and the whole record after the last one."""
        output, metrics = self.record.outputs[seq.index], self.record.metrics
        if output.finish_reason is None:
            output.text += self.detokenizers[seq.index].finish()
            output.finish_reason = seq.status.value
            metrics.num_preemptions += seq.num_preemptions
            metrics.num_cached_tokens = seq.num_cached_tokens
        if all(other.status.finished for other in self.sequences.values()) and seq.num_forks == 0:
            for other_output in self.record.outputs:  # of an aborted request, those that never branched off
                other_output.finish_reason = other_output.finish_reason or seq.status.value
            self.record.finished = True
            metrics.finished = now
