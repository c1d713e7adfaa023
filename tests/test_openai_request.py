"""What the server refuses, and what it lets pass: over real sockets, in OpenAI's error shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mini_engine import LLM
from tests.builders import tiny_llama_dir
from tests.serving import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    IDS,
    NAME,
    SMALL,
    TALK,
    Gate,
    RunningServer,
    choices,
    events,
    offline,
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


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "body", "message"),
        [
            (COMPLETIONS, {"prompt": ""}, "the prompt is empty: it needs at least one token"),
            (COMPLETIONS, {}, "prompt must be a text, a list of token ids, or a list of either, got None"),
            (COMPLETIONS, {"prompt": []}, "prompt must be a text"),
            (COMPLETIONS, {"prompt": [[5], [5, "a"]]}, "prompt 1 must be a text or a list of token ids, got [5, 'a']"),
            (COMPLETIONS, {"prompt": [5, True]}, "prompt 0 must be"),
            (COMPLETIONS, {"prompt": ["cat", [5, 320]]}, "prompt 1: token id 320 at position 1 of prompt is outside"),
            (COMPLETIONS, {"prompt": IDS, "max_tokens": 100}, "exceed max_model_len 128: ask for at most 99 output"),
            (COMPLETIONS, {"prompt": [5] * 200, "max_tokens": None}, "exceed max_model_len 128: shorten the prompt"),
            (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
            (
                COMPLETIONS,
                {"prompt": "x", "max_tokens": "9"},
                "max_tokens must be a whole number of at least 1, got '9'",
            ),
            (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature must be a finite number of at least 0"),
            (COMPLETIONS, {"prompt": "x", "ignore_eos": "no"}, "ignore_eos must be true or false, got 'no'"),
            (COMPLETIONS, {"prompt": "x", "stream": 1}, "stream must be true or false, got 1"),
            (COMPLETIONS, {"prompt": "x", "max_token": 9}, "unknown field 'max_token': known are cache_salt, "),
            (COMPLETIONS, {"prompt": "x", "messages": TALK}, "unknown field 'messages'"),
            (COMPLETIONS, {"prompt": "x", "presence_penalty": 0.5}, "presence_penalty 0.5 is not implemented"),
            (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias {'5': 1} is not implemented"),
            (COMPLETIONS, {"prompt": "x", "add_special_tokens": False}, "add_special_tokens False is not implemented"),
            (
                COMPLETIONS,
                {"prompt": "x", "stream_options": {"continuous_usage_stats": True}},
                "'continuous_usage_stats'",
            ),
            (COMPLETIONS, {"prompt": "x", "stream_options": 5}, "stream_options must be an object"),
            (COMPLETIONS, {"prompt": "x", "priority": 1}, "priority 1 would be ignored: scheduling_policy is 'fcfs'"),
            (COMPLETIONS, {"prompt": "x", "cache_salt": ""}, "cache_salt must be a non-empty text"),
            (COMPLETIONS, {"prompt": "x", "n": 1000}, "n=1000 outputs exceed max_num_seqs 256"),
            (COMPLETIONS, {"prompt": "\ud800"}, "not text that can be encoded (a lone surrogate?)"),
            (COMPLETIONS, {"\ud800": 1}, "unknown field '\\ud800'"),
            (COMPLETIONS, b"{", "the body is not JSON: Expecting property name"),
            (COMPLETIONS, b"\xff", "the body is not JSON"),
            (COMPLETIONS, b"[]", "the body must be a JSON object, got list"),
            (COMPLETIONS, b"[" * 100_000, "the body is not JSON"),
            (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', "temperature must be a finite number"),
            (CHAT, {}, "messages must be a non-empty list"),
            (CHAT, {"messages": [{"content": "x"}]}, 'message 0 must have a "role"'),
            (CHAT, {"messages": "hello"}, "messages must be a non-empty list"),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type 'text' only"),
            (CHAT, {"messages": TALK, "top_logprobs": 2}, "top_logprobs 2 needs logprobs true beside it"),
            (
                CHAT,
                {"messages": TALK, "tools": [{"type": "function"}]},
                "tools [{'type': 'function'}] is not implemented",
            ),
            (CHAT, {"messages": TALK, "response_format": {"type": "json_object"}}, "response_format"),
            (CHAT, {"messages": TALK, "chat_template_kwargs": {"messages": 1}}, "may not name 'messages'"),
            (CHAT, {"messages": TALK, "prompt": "x"}, "unknown field 'prompt'"),
        ],
        ids=lambda value: str(value)[:40].encode("ascii", "backslashreplace").decode(),
    )
    def test_status_400_and_one_line(self, server: RunningServer, path: str, body: Any, message: str) -> None:
        status, answer = server.post(path, body)
        error = answer["error"]
        assert (status, error["code"], error["type"]) == (400, 400, "invalid_request_error")
        assert message in error["message"] and "\n" not in error["message"]
        server.assert_idle()

    def test_another_model_or_route(self, server: RunningServer) -> None:
        status, answer = server.post(COMPLETIONS, {"prompt": "x", "model": "gpt-5"})
        assert (status, answer["error"]["type"]) == (404, "not_found_error")
        assert answer["error"]["message"] == "the model 'gpt-5' is not served here: 'tiny' is"
        assert server.post(COMPLETIONS, {"prompt": "x", "model": NAME})[0] == 200
        assert [server.post(path, {})[0] for path in ("/v1/embeddings", "/health")] == [404, 405]

    def test_fields_that_change_nothing_pass(self, server: RunningServer, llm: LLM) -> None:
        nothing = {
            "user": "me",
            "metadata": {"a": 1},
            "presence_penalty": 0,
            "logit_bias": {},
            "echo": None,
            "min_p": 0.0,
        }
        chat_only = {
            "tools": [],
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "add_special_tokens": False,
        }
        body = {"messages": TALK, "return_token_ids": True, **GREEDY}
        assert choices(server.post(CHAT, {**body, **nothing, **chat_only})[1]) == choices(server.post(CHAT, body)[1])

    def test_a_refusal_disturbs_no_other(self, server: RunningServer, llm: LLM, gate: Gate) -> None:
        connection = server.open("POST", COMPLETIONS, json.dumps({"prompt": IDS, "stream": True, **GREEDY}).encode())
        with ThreadPoolExecutor() as pool:
            refusals = [pool.submit(server.post, COMPLETIONS, {"prompt": bad}) for bad in ("", [999], [5] * 500)]
            gate.allow(12)
            parts = [event["choices"][0]["text"] for event in events(connection.getresponse()) if event != "[DONE]"]
            assert [refusal.result()[0] for refusal in refusals] == [400] * 3
        assert "".join(parts) == offline(llm, IDS)[0][0]
