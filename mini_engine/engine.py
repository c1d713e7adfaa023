"""The step loop: add_request → schedule → execute → sample → update → text.

Everything a request needs is refused or settled in `add_request`; after that it runs to its end, whatever happens to
the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch

from mini_engine.batch import logits_rows
from mini_engine.cache_key import CacheKey, rope_rule
from mini_engine.config import EngineConfig
from mini_engine.errors import RequestError
from mini_engine.executor import make_runner
from mini_engine.host_cache import open_prefix_tier
from mini_engine.output_processor import RequestOutput, RequestState
from mini_engine.pipeline import Flight, Pipeline
from mini_engine.runner import ModelRunner
from mini_engine.sampler import SamplerOutput, TokenLogprobs, sample
from mini_engine.scheduler import Scheduler, SchedulerOutput
from mini_engine.sequence import SamplingParams, Sequence, SequenceStatus
from mini_engine.weights import open_checkpoint

Prompt = str | Mapping[str, Any]
Draw = tuple[Sequence, int, TokenLogprobs | None]


class LLMEngine:
    """One model, one scheduler, and the requests in flight. Not thread-safe: one caller steps it.

    Raises ModelLoadError for a model that cannot be used, ConfigError for settings that cannot.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.perf_counter):
        self.config = config
        self.clock = clock
        with open_checkpoint(config.model) as checkpoint:
            self.name = checkpoint.name
            self.model_config = checkpoint.config
            self.eos_token_ids = checkpoint.eos_token_ids
            self.tokenizer = checkpoint.tokenizer()
            runner = make_runner(config, checkpoint)
            self.runner: Any = runner  # with one rank a ModelRunner, at which benches and replays look more closely
            kv_format = str(runner.kv_dtype).removeprefix("torch.")
            model = f"{checkpoint.name} {checkpoint.revision} in {runner.dtype}"
        here = cast(ModelRunner, runner)  # what the next lines make is refused with several ranks
        tier = open_prefix_tier(config, self.model_config, here, clock) if config.host_cache_bytes else None
        self.scheduler = Scheduler(
            config.scheduler_config(runner.max_model_len, runner.num_blocks, runner.num_host_blocks),
            CacheKey(model, position_rule=rope_rule(self.model_config), kv_format=kv_format),
            tier,
        )
        self._pipeline = Pipeline(here) if config.async_scheduling else None
        self._in_flight: Flight | None = None
        self.requests: dict[str, RequestState] = {}

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Queue a prompt: text, or {"prompt_token_ids": [...]}. Returns the record that later steps fill in.

        Raises RequestError (PoolTooSmall) for what could never be served; then nothing was queued.
        """
        return self.submit(self.prepare(request_id, prompt, params, priority, cache_salt))

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestState:
        """Tokenise and check a request without queueing it. Raises RequestError."""
        if not isinstance(priority, int):
            raise RequestError(f"priority must be a whole number (lower runs first), got {priority!r}")
        params = params or SamplingParams()
        seq = Sequence(request_id, self._token_ids(prompt), params, self.eos_token_ids, priority, cache_salt=cache_salt)
        self._check_tokens("prompt", seq.token_ids)
        self._check_tokens("stop_token_ids", params.stop_token_ids or ())
        self.scheduler.validate(seq)
        text = prompt if isinstance(prompt, str) else prompt.get("prompt")
        return RequestState(seq, text, self.tokenizer, self.clock())

    def submit(self, request: RequestState) -> RequestOutput:
        """Queue a prepared request."""
        request_id = request.record.request_id
        if request_id in self.requests:
            raise RequestError(f"request id {request_id!r} is in use by a request that has not finished")
        self.scheduler.add(request.sequences[0])
        self.requests[request_id] = request
        return request.record

    def abort(self, request_id: str) -> None:
        """End a request now. Its blocks are free on return, or, if a step in flight computes it, when that has landed.
        Unknown ids, and finished ones, are ignored."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            for seq in list(request.sequences.values()):
                self.scheduler.finish(seq, SequenceStatus.FINISHED_ABORTED)
                request.close(seq, self.clock())

    def has_unfinished_requests(self) -> bool:
        """Whether there is something left to do for `step()`: requests, or a step in flight."""
        return bool(self.requests) or self._in_flight is not None

    def step(self) -> list[RequestOutput]:
        """Run one step; the records of the requests that got a token, in the order of the batch.

        If the forward pass fails or is interrupted, every request is computed anew by the next steps.
        """
        if self._pipeline is not None:
            return self._step_in_flight(self._pipeline)
        output = self._schedule()
        if not output.scheduled:
            return []
        try:
            drawn = self._sample(self.runner.execute(output), output)
        except BaseException:
            self.scheduler.undo(output)
            raise
        return self._collect(self._update(output, drawn))

    def _step_in_flight(self, pipeline: Pipeline) -> list[RequestOutput]:
        """The same with one step ahead: while one runs, schedule the next, then take in the first and submit the next.

        What a caller sees of a step comes while the next one runs already.
        """
        landing = self._in_flight or self._submit(pipeline, self._schedule())
        if landing is None:
            return []
        self._in_flight = None
        ahead = self._schedule()
        try:
            pipeline.start_copies(ahead)
            drawn = self._sample(landing.logits.result(), landing.output)
        except BaseException:
            pipeline.settle(landing)
            self.scheduler.undo(landing.output, ahead)
            raise
        taken = self._update(landing.output, drawn)
        try:
            self._in_flight = self._submit(pipeline, ahead)
        finally:
            records = self._collect(taken)
        if not self.requests and self._in_flight is not None:
            self._step_in_flight(pipeline)  # nobody waits for its tokens: only its blocks are to come back
        return records

    def close(self) -> None:
        """End the processes of other ranks, where there are any; no step can run any more then. May be called again."""
        self.runner.close()

    def _submit(self, pipeline: Pipeline, output: SchedulerOutput) -> Flight | None:
        """Send a step on its way, if it has something to do; if that fails, undo it."""
        if not output.scheduled:
            return None
        for seq, _ in output.sampled:  # siblings are known from now on, so that an abort in flight ends them too
            if seq.index and not seq.status.finished:
                self.requests[seq.request_id].sequences[seq.index] = seq
        try:
            return pipeline.submit(output)
        except BaseException:
            pipeline.settle(None)
            self.scheduler.undo(output)
            raise

    def _schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        now = self.clock()
        for seq, _, _ in output.scheduled:
            self.requests[seq.request_id].scheduled(now)
        return output

    def _sample(self, logits: torch.Tensor, output: SchedulerOutput) -> SamplerOutput:
        return sample(logits, logits_rows(output), [seq for seq, _ in output.sampled], self.config.seed)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, on the host too; False, and nothing done, while requests are running."""
        return self.scheduler.reset_prefix_cache()

    def _update(self, output: SchedulerOutput, drawn: SamplerOutput) -> list[Draw]:
        """Let the scheduler take in the tokens; those that count, since their sequence had not ended before."""
        taken = [
            (seq, token, logprobs)
            for (seq, _), token, logprobs in zip(output.sampled, drawn.tokens, drawn.logprobs, strict=True)
            if not seq.status.finished
        ]
        self.scheduler.update(output, drawn.tokens)
        return taken

    def _collect(self, taken: Iterable[Draw]) -> list[RequestOutput]:
        """Hand the drawn tokens to their requests, end those that reached a stop string, close those that are done."""
        now = self.clock()
        advanced: dict[str, RequestState] = {}
        for seq, token, logprobs in taken:
            request = advanced.get(seq.request_id)
            if request is None:
                request = advanced[seq.request_id] = self.requests[seq.request_id]
                request.begin_step(now)
            if request.append(seq, token, logprobs) and not seq.status.finished:
                self.scheduler.finish(seq, SequenceStatus.FINISHED_STOPPED)
            if seq.status.finished:
                request.close(seq, now)
        for request_id, request in advanced.items():
            if request.record.finished:
                del self.requests[request_id]
        return [request.record for request in advanced.values()]

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            ids = prompt.get("prompt_token_ids")
            if ids is None and isinstance(prompt.get("prompt"), str):
                return self.tokenizer.encode(prompt["prompt"])
            if isinstance(ids, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                return list(ids)
        raise RequestError(
            f"a prompt is a text or {{'prompt_token_ids': [whole numbers]}}, got {type(prompt).__name__}"
        )

    def _check_tokens(self, name: str, tokens: Iterable[int]) -> None:
        for position, token in enumerate(tokens):
            if not 0 <= token < self.model_config.vocab_size:
                raise RequestError(
                    f"token id {token} at position {position} of {name} is outside the model's vocabulary "
                    f"(0 to {self.model_config.vocab_size - 1})"
                )
