"""Options made of EngineConfig's fields, as the command line has them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mini_engine.cli import _engine_config, build_parser, main
from mini_engine.config import EngineConfig
from mini_engine.engine_options import HELP, PARALLEL, SERVING

COMMANDS = [["serve"], ["generate", "--prompt", "x"]]


def config(*args: str) -> EngineConfig:
    return _engine_config(build_parser().parse_args(args))


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_defaults_are_the_configs(command: list[str]) -> None:
    assert config(*command) == EngineConfig()


@pytest.mark.parametrize("command", COMMANDS, ids=str)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-tp 4 -dcp 2", {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
        ("--tensor-parallel-size=2", {"tensor_parallel_size": 2}),
        ("-tp 2 --decode-context-parallel-size 2", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
        ("-tp 2 -dcp 2 --cp-kv-cache-interleave-size 4", {"cp_kv_cache_interleave_size": 4}),
        ("-tp 2 -dcp 2 --dcp-kv-cache-interleave-size 4", {"cp_kv_cache_interleave_size": 4}),
        ("--dcp-comm-backend a2a", {"dcp_comm_backend": "a2a"}),
        ("--dcp-q-replicate", {"dcp_q_replicate": True}),
        ("--distributed-executor-backend local", {"distributed_executor_backend": "local"}),
        ("--num-padded-query-heads 12", {"num_padded_query_heads": 12}),
    ],
)
def test_parallel_options_arrive(command: list[str], options: str, expected: dict[str, Any]) -> None:
    made = dataclasses.asdict(config(*command, *options.split()))
    assert {name: made[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--max-num-seqs 3 --max-num-batched-tokens 64", {"max_num_seqs": 3, "max_num_batched_tokens": 64}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--scheduling-policy priority", {"scheduling_policy": "priority"}),
        ("--gpu-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
        ("--num-gpu-blocks-override 9 --enforce-eager", {"num_gpu_blocks_override": 9, "enforce_eager": True}),
        ("--attention-backend torch --async-scheduling", {"attention_backend": "torch", "async_scheduling": True}),
        ("--block-size 8 --kv-cache-memory-bytes 5", {"block_size": 8, "kv_cache_memory_bytes": 5}),
    ],
)
def test_serving_options_arrive(options: str, expected: dict[str, Any]) -> None:
    made = dataclasses.asdict(config("serve", *options.split()))
    assert {name: made[name] for name in expected} == expected


def test_the_seed_of_generate_is_the_requests() -> None:
    assert config("generate", "--prompt", "x", "--seed", "3").seed == EngineConfig().seed


def test_every_option_is_a_field_and_has_a_help() -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert {*PARALLEL, *SERVING} == HELP.keys() <= fields


def test_help_of_serve_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "example: mini-engine serve" in capsys.readouterr().out


def test_bad_sizes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "x", "-tp", "3", "-dcp", "2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mini-engine: decode_context_parallel_size 2 must divide") and err.count("\n") == 1
