"""An OpenAI-compatible HTTP server over one engine: `mini-engine serve`.

    POST /v1/completions, /v1/chat/completions      whole or as server-sent events, which end with [DONE]
    GET  /v1/models, /health, /metrics              metrics in Prometheus' text format, under vLLM's names

A refusal is status 400 with the engine's one line in OpenAI's error shape; it disturbs no other request. A client that
hangs up aborts its requests. Needs fastapi and uvicorn (the extra `server`); routes and errors as in vLLM's api_server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from mini_engine.async_call import EngineStats, EngineStopped, StepFailed
from mini_engine.async_engine import AsyncEngine
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.errors import ConfigError, EngineError, RequestError
from mini_engine.openai_request import Body, GenerationRequest, parse_chat, parse_completion
from mini_engine.openai_response import ChatAnswer, CompletionAnswer

ERROR_TYPES = {404: "not_found_error", 500: "internal_server_error", 503: "service_unavailable_error"}
HUNG_UP = 499  # nginx's number for a client that left; nobody reads it


class ModelNotFound(RequestError):
    """A request for another model than the one that is served."""


# Of errors; all other EngineErrors are the client's: 400.
STATUS: dict[type[Exception], int] = {ModelNotFound: 404, StepFailed: 500, EngineStopped: 503}


def serve(config: EngineConfig, host: str, port: int, model_name: str | None = None) -> int:
    """Load the model and answer until Ctrl-C. model_name: what clients call it; None is `config.model`.

    Raises ConfigError for an address that cannot be had (before the model is loaded), what LLMEngine raises, and
    EngineStopped when the engine's ranks have died.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or config.distributed_executor_backend == "external_launcher":
        raise ConfigError("requests would reach one rank only: serve without torchrun, it starts its ranks itself")
    with bind(host, port) as listener, contextlib.closing(LLMEngine(config)) as engine:
        async_engine = AsyncEngine(engine)
        Server(build_app(async_engine, model_name or config.model), announce=True).run(sockets=[listener])
    if async_engine.failure is not None:
        raise async_engine.failure
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address that does not listen yet. Port 0 is any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot serve on {host} port {port}: {reason}. Choose another --host or --port") from None
    return listener


class Server(uvicorn.Server):
    """Uvicorn, but the first Ctrl-C ends the answers that are under way instead of waiting for them, and so does the
    end of the engine."""

    def __init__(self, app: FastAPI, announce: bool = False):
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=10))
        self._app, self._announce = app, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._announce and sockets:
            host, port = sockets[0].getsockname()[:2]
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            name = self._app.state.model_name
            print(f"mini-engine: serving {name} on {address} (Ctrl-C ends it)", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or not self._app.state.engine.alive

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.engine.stop()
        await super().shutdown(sockets)


def build_app(engine: AsyncEngine, model_name: str) -> FastAPI:
    """The routes. The engine starts and stops with the application."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        engine.stop()
        await engine.join()

    app = FastAPI(title="mini-engine", lifespan=lifespan)
    app.state.engine, app.state.model_name = engine, model_name
    for error_class in (EngineError, HTTPException, Exception):
        app.add_exception_handler(error_class, _refusal)
    started = int(time.time())

    async def answer(
        http: Request, parse: Callable[[Body], GenerationRequest], answer_class: type[CompletionAnswer]
    ) -> Response:
        body = await _json(http)
        if body.get("model") not in (None, model_name):
            raise ModelNotFound(f"the model {body['model']!r:.100} is not served here: {model_name!r} is")
        request = parse(body)
        call = await engine.submit(
            f"{answer_class.id_prefix}{uuid.uuid4().hex}",
            request.prompts,
            request.params,
            fill_context=request.fill_context,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        shaped = answer_class(request, call, model_name)
        return EventStream(shaped) if request.stream else await _whole(http, shaped)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await answer(http, parse_completion, CompletionAnswer)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await answer(http, parse_chat, ChatAnswer)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model_name, "object": "model", "created": started, "owned_by": "mini-engine"}
        return {"object": "list", "data": [{**entry, "max_model_len": engine.max_model_len}]}

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(metrics_text(engine.stats, model_name))

    return app


class EventStream(StreamingResponse):
    """An answer as server-sent events, one a chunk. However it ends, the call is closed."""

    def __init__(self, answer: CompletionAnswer):
        super().__init__(_events(answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._call = answer.call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


async def _events(answer: CompletionAnswer) -> AsyncIterator[str]:
    try:
        async for delta in answer.call:
            for chunk in answer.chunks(delta):
                yield _event(chunk)
        if answer.request.include_usage:
            yield _event(answer.usage_chunk())
    except EngineError as error:  # the status has been sent, so the stream has to say it
        yield _event(_error_body(_status(error), str(error)))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def _whole(http: Request, answer: CompletionAnswer) -> Response:
    """Wait for the whole answer, or until the client hangs up."""
    work = asyncio.create_task(answer.whole())
    hung_up = asyncio.create_task(_disconnect(http))
    try:
        await asyncio.wait((work, hung_up), return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(work.result()) if work.done() else Response(status_code=HUNG_UP)
    finally:
        hung_up.cancel()
        work.cancel()
        answer.call.close()


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _json(http: Request) -> Body:
    try:
        body = await http.json()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


async def _refusal(http: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        return JSONResponse(_error_body(error.status_code, str(error.detail)), status_code=error.status_code)
    message = str(error) if isinstance(error, EngineError) else f"the server failed: {type(error).__name__}: {error}"
    return JSONResponse(_error_body(_status(error), message), status_code=_status(error))


def _status(error: Exception) -> int:
    return STATUS.get(type(error), 400 if isinstance(error, EngineError) else 500)


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def metrics_text(stats: EngineStats, model_name: str) -> str:
    """Prometheus' text format, version 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/"""
    return "\n".join(_metric_lines(stats, model_name)) + "\n"


def _metric_lines(stats: EngineStats, model_name: str) -> Iterator[str]:
    quoted = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    rows: list[tuple[str, str, str, float]] = [
        ("num_requests_running", "gauge", "Sequences in execution batches", stats.num_requests_running),
        ("num_requests_waiting", "gauge", "Requests waiting to be processed", stats.num_requests_waiting),
        ("kv_cache_usage_perc", "gauge", "KV blocks in use, 1 is all", stats.kv_cache_usage),
        ("num_preemptions_total", "counter", "Preemptions", stats.num_preemptions),
        ("prompt_tokens_total", "counter", "Prompt tokens of requests with a first token", stats.prompt_tokens),
        ("generation_tokens_total", "counter", "Tokens generated", stats.generation_tokens),
        ("prefix_cache_queries_total", "counter", "Tokens looked up in the cache", stats.prefix_cache_queries),
        ("prefix_cache_hits_total", "counter", "Tokens found in the prefix cache", stats.prefix_cache_hits),
    ]
    for name, kind, help_text, value in rows:
        yield f"# HELP vllm:{name} {help_text}."
        yield f"# TYPE vllm:{name} {kind}"
        yield f'vllm:{name}{{model_name="{quoted}"}} {value}'
    yield "# HELP vllm:request_success_total Requests that ended, by their reason."
    yield "# TYPE vllm:request_success_total counter"
    for reason, count in sorted(stats.finished.items()):
        yield f'vllm:request_success_total{{finished_reason="{reason}",model_name="{quoted}"}} {count}'
