"""Who runs an engine's steps, and what an engine of several ranks would be."""

from __future__ import annotations

from typing import Any

import pytest

from mini_engine import LLM, EngineConfig
from mini_engine.errors import ConfigError
from mini_engine.executor import LocalRunner, make_runner
from mini_engine.info import describe, table
from mini_engine.runner import ModelRunner
from mini_engine.weights import open_checkpoint
from tests.builders import tiny_deepseek_v2_dir, tiny_llama_dir
from tests.rank_cases import params, tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one of two processes of torchrun."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def runner_of(model: str, **options: Any) -> Any:
    config = EngineConfig(model, **options)
    with open_checkpoint(model) as checkpoint:
        return make_runner(config, checkpoint)


class TestMakeRunner:
    def test_one_rank_is_this_process(self, model):
        assert type(runner_of(model)) is ModelRunner
        assert type(runner_of(model, distributed_executor_backend="mp")) is ModelRunner

    def test_local_is_threads(self, model):
        runner = runner_of(model, tensor_parallel_size=2, distributed_executor_backend="local")
        assert type(runner) is LocalRunner and [rank.group.rank for rank in runner.ranks] == [0, 1]

    @pytest.mark.parametrize("backend", ["auto", "external_launcher"])
    @pytest.mark.parametrize("size", [1, 4])
    def test_torchrun_with_another_number_of_processes(self, size, backend, model, launched):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size {size} does not go with the 2 processes"):
            runner_of(model, tensor_parallel_size=size, distributed_executor_backend=backend)

    def test_an_engine_of_its_own_under_torchrun(self, model, launched):
        """Asked for by name: 'auto' takes it for a forgotten tensor_parallel_size."""
        assert type(runner_of(model, distributed_executor_backend="mp")) is ModelRunner

    def test_external_launcher_without_torchrun(self, model):
        with pytest.raises(ConfigError, match="is for a script that torchrun starts; use 'mp'"):
            runner_of(model, tensor_parallel_size=2, distributed_executor_backend="external_launcher")

    def test_sizes_are_refused_before_anybody_waits_for_other_ranks(self, model, launched):
        with pytest.raises(ConfigError, match="have no copies"):
            runner_of(model, tensor_parallel_size=2, decode_context_parallel_size=2)


class TestLocalRunner:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_step_that_fails_on_one_rank_leaves_the_engine_usable(self, rank, model, monkeypatch):
        llm = LLM(model, dtype="float32", tensor_parallel_size=2, distributed_executor_backend="local")
        runner = llm.engine.runner

        def fail(*args: Any) -> None:
            raise KeyError("lost")

        with monkeypatch.context() as patch:
            patch.setattr(runner.ranks[rank].model, "forward", fail)
            with pytest.raises(KeyError, match="lost"):
                llm.generate({"prompt_token_ids": [5, 6]}, params())
        assert tokens(llm) == tokens(LLM(model, dtype="float32"))

    def test_what_ranks_exchange_is_there_to_look_at(self, model):
        llm = LLM(model, tensor_parallel_size=4, decode_context_parallel_size=2, distributed_executor_backend="local")
        llm.generate({"prompt_token_ids": [5, 6]}, params(max_tokens=2))
        names = [record.name for record in llm.engine.runner.collectives()]
        assert names.count("all_reduce") == 2 * (1 + 2 * 2)  # two steps: the embedding, and twice a layer
        assert "reduce_scatter" in names  # the second step has a context


PARALLEL: list[dict[str, Any]] = [
    {},
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
    {"tensor_parallel_size": 2, "num_padded_query_heads": 6},
]


class TestInfo:
    @pytest.mark.parametrize("latent", [False, True], ids=["llama", "mla"])
    @pytest.mark.parametrize("options", PARALLEL, ids=str)
    def test_figures_are_those_of_a_rank(self, options, latent, model, tmp_path):
        if latent:
            if "num_padded_query_heads" in options:
                pytest.skip("the model has no such heads")
            model = str(tiny_deepseek_v2_dir(tmp_path))
        config = EngineConfig(model, kv_cache_memory_bytes=70_000, distributed_executor_backend="local", **options)
        report = describe(config, 30, 20)
        runner = LLM(config).engine.runner
        rank = runner if isinstance(runner, ModelRunner) else runner.ranks[-1]
        assert report["model"]["weight_bytes"] == rank.weight_bytes
        assert report["model"]["kv_bytes_per_token"] == rank.kv.bytes_per_token
        assert report["kv_cache"]["bytes"] == rank.kv_bytes <= 70_000
        assert report["kv_cache"]["num_blocks"] == rank.num_blocks

    def test_tokens_and_requests_are_those_of_all_ranks_together(self, model):
        """A rank of 4 has one of 2 KV heads, half the bytes; two ranks share a context, so a block is 32 tokens."""
        reports = [
            describe(EngineConfig(model, kv_cache_memory_bytes=10**6, **options), 100, 50) for options in PARALLEL[:3]
        ]
        per_token, blocks = 2 * 2 * 2 * 16 * 4, []
        for report, kv_heads_of, tokens_a_block in zip(reports, (1, 2, 2), (16, 16, 32), strict=True):
            blocks.append(10**6 // (16 * per_token // kv_heads_of) - 1)
            assert report["kv_cache"]["tokens"] == blocks[-1] * tokens_a_block
            assert report["requests"]["blocks_each"] == -(-149 // tokens_a_block)
            assert report["requests"]["fit"] == blocks[-1] // -(-149 // tokens_a_block)
        assert [report["requests"]["fit"] for report in reports] == [12, 24, 48]

    def test_so_many_fit_and_not_one_more(self, model):
        options = {**PARALLEL[2], "kv_cache_memory_bytes": 70_000}
        fit = describe(EngineConfig(model, **options), 30, 20)["requests"]["fit"]
        config = EngineConfig(
            model, admission="reserve", enable_prefix_caching=False, distributed_executor_backend="local", **options
        )
        llm = LLM(config)
        for i in range(fit + 1):
            llm.engine.add_request(str(i), {"prompt_token_ids": [5 + i] * 30}, params(max_tokens=20))
        llm.engine.step()
        assert len(llm.engine.scheduler.running) == fit > 0

    def test_table_says_what_is_a_ranks(self, model):
        whole, cut = (table(describe(EngineConfig(model, **options), 100, 50)) for options in PARALLEL[:3:2])
        assert "ranks" not in whole and "a rank" not in whole
        assert "4; 2 of them share a context, so a block is 32 of its tokens" in cut
        assert cut.count("MiB in float32 a rank") == 1 and "MiB a rank" in cut

    def test_sizes_that_do_not_fit_are_refused(self, model):
        with pytest.raises(ConfigError, match="must divide the 4 query heads"):
            describe(EngineConfig(model, tensor_parallel_size=3), 100, 50)
