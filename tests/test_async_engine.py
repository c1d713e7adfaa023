"""The thread that owns the engine: clients that hang up, steps that fail, many at once. Mostly over real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mini_engine import LLM, EngineConfig, LLMEngine, SamplingParams
from mini_engine.async_call import EngineStopped
from mini_engine.async_engine import AsyncEngine
from mini_engine.groups import GroupError
from tests.builders import tiny_llama_dir
from tests.serving import (
    COMPLETIONS,
    GREEDY,
    IDS,
    SMALL,
    Gate,
    RunningServer,
    choices,
    events,
    offline,
    until,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[RunningServer]:
    with RunningServer(model) as running:
        yield running


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, **SMALL)


@pytest.fixture
def gate(server: RunningServer) -> Iterator[Gate]:
    gate = Gate(server.engine)
    yield gate
    gate.remove()
    server.assert_idle()


class TestHangingUp:
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("n", [1, 3])
    def test_aborts_and_frees_the_blocks(self, server: RunningServer, gate: Gate, stream: bool, n: int) -> None:
        before = dict(server.async_engine.stats.finished)
        body = {"prompt": [IDS, "the cat"], "stream": stream, "n": n, **GREEDY, "max_tokens": 90, "temperature": 1}
        connection = server.open("POST", COMPLETIONS, json.dumps(body).encode())
        gate.allow(3)
        if stream:
            assert next(events(connection.getresponse()))["choices"]
        else:
            until(lambda: gate.num_steps == 3)
        connection.close()
        for _ in range(80):  # far fewer steps than the answers would take
            if server.async_engine.stats.finished != before:
                break
            gate.allow(1)
            time.sleep(0.02)
        assert server.async_engine.stats.finished.get("abort", 0) == before.get("abort", 0) + 2
        server.assert_idle()
        assert server.async_engine.stats.kv_cache_usage == 0

    def test_before_it_was_scheduled(self, server: RunningServer, llm: LLM, gate: Gate) -> None:
        """A step is running for somebody else: he gets what he would have got."""
        first = server.open("POST", COMPLETIONS, json.dumps({"prompt": IDS, **GREEDY}).encode())
        until(lambda: server.engine.scheduler.has_unfinished())
        second = server.open("POST", COMPLETIONS, json.dumps({"prompt": "the cat", **GREEDY}).encode())
        second.close()
        gate.allow(12)
        assert json.loads(first.getresponse().read())["choices"][0]["text"] == offline(llm, IDS)[0][0]
        gate.allow(12)  # for the case that the other one had come in before it was seen to have left
        server.assert_idle()


class TestFailures:
    def test_a_failed_step_ends_a_stream_with_the_error_and_the_server_stays_up(
        self, server: RunningServer, llm: LLM, gate: Gate
    ) -> None:
        connection = server.open("POST", COMPLETIONS, json.dumps({"prompt": IDS, **GREEDY, "stream": True}).encode())
        stream = events(connection.getresponse())
        gate.allow(2)
        assert [next(stream)["choices"][0]["index"] for _ in range(2)] == [0, 0]
        gate.failure = RuntimeError("out of\nmemory")
        gate.allow(1)
        error, done = stream
        message = "the step failed, and with it all that was running: RuntimeError: out of memory"
        assert (error["error"]["message"], error["error"]["code"], done) == (message, 500, "[DONE]")
        server.assert_idle()
        assert server.request("GET", "/health")[0] == 200
        gate.remove()
        assert server.post(COMPLETIONS, {"prompt": IDS, **GREEDY})[1]["choices"][0]["text"] == offline(llm, IDS)[0][0]

    def test_all_waiting_requests_get_the_error(self, model: str) -> None:
        with RunningServer(model, max_num_seqs=1) as server:
            gate = Gate(server.engine)
            with ThreadPoolExecutor() as pool:
                body = {"prompt": IDS, **GREEDY, "max_tokens": 90}
                answers = [pool.submit(server.post, COMPLETIONS, body) for _ in range(4)]
                for _ in range(80):
                    if server.metric("num_requests_waiting") == 3:
                        break
                    gate.allow(1)
                    time.sleep(0.02)
                gate.failure = RuntimeError("out of memory")
                gate.allow(1)
                assert [answer.result()[0] for answer in answers] == [500] * 4
            server.assert_idle()
            assert 'finished_reason="error",model_name="tiny"} 4' in server.request("GET", "/metrics")[1]

    def test_a_mistake_of_ours_is_an_error_in_the_same_shape(
        self, server: RunningServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(server.engine, "prepare", lambda *_: 1 / 0)
            status, answer = server.post(COMPLETIONS, {"prompt": IDS})
            assert (status, answer["error"]["code"]) == (500, 500)
            assert answer["error"]["message"] == "the request was not taken in: ZeroDivisionError: division by zero"
            patch.setattr(server.async_engine, "submit", None)
            status, answer = server.post(COMPLETIONS, {"prompt": IDS})
            assert (status, answer["error"]["type"]) == (500, "internal_server_error")
            assert answer["error"]["message"].startswith("the server failed: TypeError: ")
        assert server.post(COMPLETIONS, {"prompt": IDS, **GREEDY})[0] == 200

    def test_ranks_that_died_end_the_server(self, model: str) -> None:
        with RunningServer(model) as server:
            gate = Gate(server.engine)
            gate.failure = GroupError("rank 1 ended")
            gate.allow(1)
            status, answer = server.post(COMPLETIONS, {"prompt": IDS, **GREEDY})
            assert (status, answer["error"]["message"]) == (503, "the engine has ended: rank 1 ended")
            server.thread.join(timeout=20)
            assert not server.thread.is_alive()  # it ended by itself
            assert str(server.async_engine.failure) == "the engine has ended: rank 1 ended"


class TestAsyncEngine:
    """What HTTP cannot be made to do at will."""

    def test_a_submit_given_up_before_it_was_taken_in_leaves_nothing(self, model: str) -> None:
        async def give_up(taken_in: bool) -> None:
            engine = LLMEngine(EngineConfig(model, **SMALL))
            gate, calls = Gate(engine), AsyncEngine(engine)
            calls.start()
            params = SamplingParams(**GREEDY)
            first = await calls.submit("first", [{"prompt_token_ids": IDS}], params)
            second = asyncio.create_task(calls.submit("second", ["the cat"], params))
            await asyncio.sleep(0)  # it has left its work in the inbox, and the step waits at the gate
            if taken_in:
                gate.allow(1)
                until(lambda: len(engine.requests) == 2)  # blocks the loop, so that nobody is told yet
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            gate.allow(40)
            assert len([token async for delta in first for token in delta.token_ids]) == 12
            calls.stop()
            await calls.join()
            assert calls.stats.finished == ({"length": 1, "abort": 1} if taken_in else {"length": 1})
            assert not engine.has_unfinished_requests()
            engine.scheduler.check()

        for taken_in in (False, True):
            asyncio.run(give_up(taken_in))

    def test_after_the_end_nothing_is_taken_in(self, model: str) -> None:
        async def run() -> None:
            calls = AsyncEngine(LLMEngine(EngineConfig(model, **SMALL)))
            calls.start()
            calls.stop()
            with pytest.raises(EngineStopped, match="shutting down"):
                await calls.submit("late", ["the cat"], SamplingParams(**GREEDY))
            await calls.join()
            assert not calls.alive

        asyncio.run(run())


class TestTogether:
    def test_ranks_answer_as_one(self, model: str, llm: LLM) -> None:
        options = {
            "tensor_parallel_size": 4,
            "decode_context_parallel_size": 2,
            "distributed_executor_backend": "local",
        }
        with RunningServer(model, **options) as server:
            body = {"prompt": ["the cat", IDS], "return_token_ids": True, **GREEDY}
            answer = server.post(COMPLETIONS, body)[1]
            assert choices(answer) == [offline(llm, "the cat")[0], offline(llm, IDS)[0]]
            server.assert_idle()

    @pytest.mark.parametrize("async_scheduling", [False, True])
    def test_many_at_once_get_what_each_gets_alone(self, model: str, llm: LLM, async_scheduling: bool) -> None:
        prompts = [[5 + i, *IDS[: 3 * i]] for i in range(10)]
        with RunningServer(model, async_scheduling=async_scheduling, num_gpu_blocks_override=33) as server:
            with ThreadPoolExecutor(10) as pool:
                bodies = [{"prompt": prompt, "return_token_ids": True, **GREEDY} for prompt in prompts]
                answers = list(pool.map(lambda body: server.post(COMPLETIONS, body)[1], bodies))
            assert [choices(answer) for answer in answers] == [offline(llm, prompt) for prompt in prompts]
            server.assert_idle()

    def test_priorities_order_the_waiting(self, model: str) -> None:
        with RunningServer(model, scheduling_policy="priority", max_num_seqs=1) as server:
            gate, order = Gate(server.engine), []

            def ask(priority: int) -> None:
                server.post(COMPLETIONS, {"prompt": IDS, "priority": priority, **GREEDY, "max_tokens": 1})
                order.append(priority)
                gate.allow(1)

            with ThreadPoolExecutor() as pool:
                first = pool.submit(ask, 0)
                until(lambda: server.engine.scheduler.has_unfinished())
                rest = [pool.submit(ask, priority) for priority in (3, 1, 2)]
                until(lambda: server.async_engine._inbox.qsize() == 3)
                gate.allow(1)
                for each in (first, *rest):
                    each.result()
            gate.remove()
        assert order == [0, 1, 2, 3]
