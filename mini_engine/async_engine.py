"""A thread that owns an LLMEngine, and coroutines that wait for what its steps add.

    call = await engine.submit([prompt], params)     queued; RequestError if it could never be served
    async for delta in call: ...                     what every step added
    call.close()                                     aborts what has not finished

The engine is not thread-safe, so nobody but the thread touches it: coroutines leave their work in an inbox, which is
emptied before every step, and what a step added goes back to the event loop in one piece. Names as in vLLM's AsyncLLM.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from mini_engine.async_call import Call, Conversation, EngineStats, EngineStopped, Event, LiveRequest, StepFailed
from mini_engine.engine import LLMEngine, Prompt
from mini_engine.errors import EngineError, RequestError
from mini_engine.groups import GroupError
from mini_engine.output_processor import RequestOutput, RequestState
from mini_engine.sequence import SamplingParams

logger = logging.getLogger(__name__)


class AsyncEngine:
    """The thread, its inbox, and the calls it serves. `start` and all coroutines belong to one event loop.

    stats: of the last step boundary. failure: why the thread has ended, if nobody stopped it.
    """

    def __init__(self, engine: LLMEngine):
        self.stats = EngineStats()
        self.max_model_len = engine.scheduler.config.max_model_len
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox: list[tuple[Call, Event]] = []
        self._live: dict[str, LiveRequest] = {}
        self._prompt_tokens = self._generation_tokens = 0
        self._finished: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self.failure: EngineStopped | None = None

    def start(self) -> None:
        """Start the thread. From now on the engine is its own."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def stop(self) -> None:
        """End the thread after the step it is in; what is still running then gets EngineStopped."""
        self._stopping = True
        self._inbox.put(None)

    async def join(self) -> None:
        """Wait until the thread has ended."""
        await asyncio.to_thread(self._thread.join)

    async def submit(
        self,
        call_id: str,
        prompts: Seq[Prompt | Conversation],
        params: SamplingParams,
        *,
        fill_context: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Call:
        """Queue all prompts, or none. fill_context: let the output grow to the end of the context, not to max_tokens.

        Raises RequestError (with several prompts it names the index) and EngineStopped.
        """
        if not self.alive:
            raise self._farewell()
        call, accepted = Call(call_id, len(prompts), self.abort), Future[None]()
        work = partial(self._accept, call, prompts, params, fill_context, priority, cache_salt)
        self._inbox.put(partial(_settle, accepted, work))
        try:
            await asyncio.wrap_future(accepted)
        except asyncio.CancelledError:
            call.close()
            raise
        return call

    def abort(self, call: Call) -> None:
        """`Call.close` for the thread to do."""
        self._inbox.put(partial(self._abort, call))

    def _farewell(self) -> EngineStopped:
        return self.failure or EngineStopped("the server is shutting down")

    # From here on everything runs in the thread.

    def _run(self) -> None:
        try:
            while self._take_in():
                try:
                    records = self._engine.step()
                except GroupError as error:  # ranks do not come back
                    self.failure = EngineStopped(f"the engine has ended: {_one_line(error)}")
                    break
                except Exception as error:
                    logger.exception("a step failed")
                    reason = f"{type(error).__name__}: {_one_line(error)}"
                    self._fail(StepFailed(f"the step failed, and with it all that was running: {reason}"))
                else:
                    self._publish(records)
        finally:
            self._stopping = True
            while not self._inbox.empty():
                if (work := self._inbox.get()) is not None:
                    work()
            self._fail(self._farewell())
            self._hand_out()
            self._engine.close()

    def _take_in(self) -> bool:
        """Do what the inbox asks for, waiting for it while there is nothing to compute. False: the end."""
        while True:
            idle = not self._engine.has_unfinished_requests()
            if idle or self._inbox.empty():
                self._hand_out()
            try:
                work = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if work is None:
                return False
            work()

    def _accept(
        self,
        call: Call,
        prompts: Seq[Prompt | Conversation],
        params: SamplingParams,
        fill_context: bool,
        priority: int,
        cache_salt: str | None,
    ) -> None:
        policy = self._engine.config.scheduling_policy
        if priority and policy != "priority":
            raise RequestError(
                f"priority {priority!r} would be ignored: scheduling_policy is {policy!r}, not 'priority'"
            )
        prepared: list[RequestState] = []
        for i, prompt in enumerate(prompts):
            try:
                tokens, own_params = self._prompt(prompt), params
                if fill_context:
                    own_params = replace(params, max_tokens=max(1, self._room(tokens), params.min_tokens))
                request_id = f"{call.call_id}-{i}"
                prepared.append(self._engine.prepare(request_id, tokens, own_params, priority, cache_salt))
            except RequestError as error:
                raise type(error)(f"prompt {i}: {error}" if len(prompts) > 1 else str(error)) from None
        for i, request in enumerate(prepared):
            record = self._engine.submit(request)
            self._live[record.request_id] = LiveRequest(call, i, record, [(0, 0)] * len(record.outputs))
            call.prompt_token_ids.append(record.prompt_token_ids)

    def _prompt(self, prompt: Prompt | Conversation) -> Mapping[str, Any]:
        """With token ids, whatever it was given as."""
        tokenizer = self._engine.tokenizer
        if isinstance(prompt, Conversation):
            text = tokenizer.apply_chat_template(prompt.messages, **prompt.variables)
            return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
        return {"prompt": prompt, "prompt_token_ids": tokenizer.encode(prompt)} if isinstance(prompt, str) else prompt

    def _room(self, prompt: Mapping[str, Any]) -> int:
        """Output tokens that context and pool leave to a prompt."""
        scheduler = self._engine.scheduler
        slots = scheduler.blocks.num_usable_blocks * scheduler.blocks.block_size
        return min(scheduler.config.max_model_len, slots) - len(prompt["prompt_token_ids"]) + 1

    def _abort(self, call: Call) -> None:
        for request_id in [request_id for request_id, live in self._live.items() if live.call is call]:
            self._end(request_id, "abort")

    def _fail(self, error: EngineError) -> None:
        for call in {live.call for live in self._live.values()}:
            self._outbox.append((call, error))
        for request_id in list(self._live):
            self._end(request_id, "error")

    def _end(self, request_id: str, reason: str) -> None:
        self._engine.abort(request_id)
        del self._live[request_id]
        self._finished[reason] += 1

    def _publish(self, records: Seq[RequestOutput]) -> None:
        for record in records:
            live = self._live[record.request_id]
            if live.sent[0] == (0, 0):
                self._prompt_tokens += len(record.prompt_token_ids)
            for delta in live.take(self._engine.tokenizer.decode):
                self._generation_tokens += len(delta.token_ids)
                self._outbox.append((live.call, delta))
            if record.finished:
                del self._live[record.request_id]
                self._finished[record.outputs[0].finish_reason or "stop"] += 1
                live.call.num_unfinished -= 1
                if live.call.num_unfinished == 0:
                    self._outbox.append((live.call, None))

    def _hand_out(self) -> None:
        """Renew the statistics, then wake the loop once with all that is new."""
        scheduler = self._engine.scheduler
        self.stats = EngineStats(
            len(scheduler.running),
            scheduler.num_waiting,
            1 - scheduler.blocks.num_free_blocks / scheduler.blocks.num_usable_blocks,
            scheduler.stats.num_preemptions,
            self._prompt_tokens,
            self._generation_tokens,
            scheduler.stats.prefix_query_tokens,
            scheduler.stats.prefix_hit_tokens,
            dict(self._finished),
        )
        if self._outbox:
            news, self._outbox = self._outbox, []
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_deliver, news)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _deliver(news: Seq[tuple[Call, Event]]) -> None:
    for call, event in news:
        call.events.put_nowait(event)


def _settle(result: Future[None], work: Callable[[], None]) -> None:
    """Run `work` for somebody who waits for `result`, unless he has left."""
    if not result.set_running_or_notify_cancel():
        return
    try:
        work()
    except EngineError as error:
        result.set_exception(error)
    except Exception as error:
        logger.exception("a request could not be taken in")
        result.set_exception(StepFailed(f"the request was not taken in: {type(error).__name__}: {_one_line(error)}"))
    else:
        result.set_result(None)
