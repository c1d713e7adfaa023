"""A server in a thread of the test's process, clients made of the standard library, and a gate for its steps."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mini_engine import LLM, SamplingParams
from mini_engine.async_engine import AsyncEngine
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.server import Server, bind, build_app

NAME = "tiny"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
IDS = list(range(20, 50))
TALK = [{"role": "user", "content": "the cat"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SMALL: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128, "num_gpu_blocks_override": 65}


class RunningServer:
    """Serves a model on a free port from `with` to its end."""

    def __init__(self, model: str, **options: Any):
        self.engine = LLMEngine(EngineConfig(model, **{**SMALL, **options}))
        self.async_engine = AsyncEngine(self.engine)
        self._server = Server(build_app(self.async_engine, NAME))
        self._listener = bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})

    def __enter__(self) -> RunningServer:
        self.thread.start()
        until(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self.thread.join()

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        connection = self.open(method, path, body)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and parsed answer; a dictionary is sent as JSON, bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, text = self.request("POST", path, data)
        return status, json.loads(text)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Every event of a streamed answer, the last one's "[DONE]" as it is."""
        connection = self.open("POST", path, json.dumps({**body, "stream": True}).encode())
        found = list(events(connection.getresponse()))
        connection.close()
        return found

    def open(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPConnection:
        """A connection on which the request has been sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body)
        return connection

    def metric(self, name: str) -> float:
        lines = [line for line in self.request("GET", "/metrics")[1].splitlines() if line.startswith(f"vllm:{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def assert_idle(self) -> None:
        """Nothing is left over: no request, no sequence, no block."""
        until(lambda: not self.engine.has_unfinished_requests())
        scheduler = self.engine.scheduler
        assert not scheduler.has_unfinished()
        assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_usable_blocks
        scheduler.check()


class Gate:
    """Lets the engine's steps through as they are allowed, and counts them. With a `failure` they raise it."""

    def __init__(self, engine: LLMEngine):
        self.num_steps = 0
        self.failure: Exception | None = None
        self._permits = threading.Semaphore(0)
        self._runner: Any = engine.runner
        self._real = engine.runner.execute
        self._runner.execute = self._execute

    def allow(self, steps: int = 1) -> None:
        self._permits.release(steps)

    def remove(self) -> None:
        """No step waits any more."""
        self._runner.execute = self._real
        self._permits.release(1)

    def _execute(self, output: Any) -> Any:
        assert self._permits.acquire(timeout=20), "nobody let this step through"
        self.num_steps += 1
        if self.failure is not None:
            raise self.failure
        return self._real(output)


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The data of server-sent events as they come."""
    for line in response:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").decode().strip()
            yield data if data == "[DONE]" else json.loads(data)


def until(condition: Callable[[], bool], tries: int = 2000) -> None:
    """Wait for another thread; AssertionError if it never comes to it."""
    for _ in range(tries):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("what was waited for did not come")


def offline(llm: LLM, prompt: Any, **params: Any) -> list[tuple[str, list[int], str | None]]:
    prompt = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
    outputs = llm.generate(prompt, SamplingParams(**{**GREEDY, **params}))[0].outputs
    return [(each.text, each.token_ids, each.finish_reason) for each in outputs]


def choices(answer: dict[str, Any]) -> list[tuple[str, list[int], str | None]]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [
        (
            choice["message"]["content"] if "message" in choice else choice["text"],
            choice["token_ids"],
            choice["finish_reason"],
        )
        for choice in answer["choices"]
    ]
