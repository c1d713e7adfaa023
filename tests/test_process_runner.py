"""Ranks as processes: the same tokens as one process, and nobody left when one of them, or the driver, ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

import psutil
import pytest
import torch

from mini_engine import LLM, EngineConfig
from mini_engine.batch import build_batch
from mini_engine.errors import ConfigError, PoolTooSmall
from mini_engine.executor import check_num_gpus
from mini_engine.groups import GroupError
from mini_engine.rank_messages import Answer, Step, pack, unpack
from mini_engine.rank_processes import RankProcesses, RanksFailed
from mini_engine.scheduler_output import ScheduledSequence, SchedulerOutput
from mini_engine.sequence import Sequence
from tests.builders import tiny_llama_dir, tiny_qwen3_dir
from tests.rank_cases import TIGHT, params, tokens

SECONDS = 30  # for what takes one or two; a rank that nobody misses would wait for half an hour
LLAMA, QWEN3 = "llama", "qwen3"
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 16}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tp 2, swap": (LLAMA, {"tensor_parallel_size": 2, "num_gpu_blocks_override": 18, **SWAP}),
    "qwen3 tp 2 dcp 2": (
        QWEN3,
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "num_gpu_blocks_override": 11},
    ),
    "llama tp 4 dcp 2, swap, a2a, q replicated": (
        LLAMA,
        {
            "tensor_parallel_size": 4,
            "decode_context_parallel_size": 2,
            "num_gpu_blocks_override": 11,
            "cp_kv_cache_interleave_size": 2,
            "dcp_comm_backend": "a2a",
            "dcp_q_replicate": True,
            **SWAP,
        },
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("models")
    return {LLAMA: str(tiny_llama_dir(directory)), QWEN3: str(tiny_qwen3_dir(directory, num_key_value_heads=1))}


@pytest.fixture(scope="module")
def alone(models) -> dict[str, list[list[int]]]:
    """The tokens of one process with room for everything."""
    return {name: tokens(LLM(model, dtype="float32", block_size=4)) for name, model in models.items()}


def gone(pids: list[int]) -> bool:
    """Whether the processes end soon, or are over already but for being waited for by whoever adopted them."""
    deadline = time.monotonic() + SECONDS
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module", params=ENGINES)
def served(request, models) -> Iterator[tuple[str, LLM]]:
    name, options = ENGINES[request.param]
    llm = LLM(models[name], dtype="float32", **TIGHT, **options)
    pids = llm.engine.runner.pids
    assert len(pids) == options["tensor_parallel_size"] and all(map(psutil.pid_exists, pids))
    assert os.getpgrp() not in map(os.getpgid, pids), "Ctrl-C would reach them"
    yield name, llm
    llm.close()


class TestTokens:
    def test_equal_those_of_one_process(self, served, alone):
        name, llm = served
        assert tokens(llm) == alone[name]
        stats = llm.engine.scheduler.stats
        assert stats.num_preemptions > 0 and stats.prefix_hit_tokens > 0
        assert (stats.num_swapped_in_blocks > 0) == (llm.engine.config.preemption_mode == "swap")

    def test_equal_them_once_more_and_a_fork_of_the_driver_ends_no_rank(self, served, alone):
        name, llm = served
        child = os.fork()
        if child == 0:
            llm.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        llm.engine.reset_prefix_cache()
        assert tokens(llm) == alone[name]

    def test_figures_are_those_of_a_rank_in_this_process(self, served, models):
        name, llm = served
        local = LLM(models[name], llm.engine.config, distributed_executor_backend="local").engine.runner
        for figure in (
            "num_blocks",
            "num_host_blocks",
            "max_model_len",
            "dtype",
            "kv_dtype",
            "weight_bytes",
            "kv_bytes",
        ):
            assert getattr(llm.engine.runner, figure) == getattr(local, figure), figure

    def test_closed_twice_and_used_after_it(self, served):
        _, llm = served
        with llm:
            pids = llm.engine.runner.pids
        llm.close()
        assert gone(pids)
        with pytest.raises(GroupError, match=r"the ranks have ended \(the engine was closed\)"):
            llm.generate({"prompt_token_ids": [5, 6]}, params())


def one_step() -> Step:
    seq = Sequence("a", [4, 5])
    seq.block_table = [1]
    output = SchedulerOutput((ScheduledSequence(seq, 0, 2),), ((seq, 0),), (), ())
    return Step.of(output, build_batch(output, 4))


@pytest.fixture
def pair(models) -> Iterator[LLM]:
    """Two ranks, to be lost in the test."""
    with LLM(models[LLAMA], dtype="float32", tensor_parallel_size=2, **TIGHT) as llm:
        yield llm


class TestEnds:
    def test_a_killed_rank_ends_the_run_and_is_named(self, pair):
        pids = pair.engine.runner.pids
        stream = pair.stream({"prompt_token_ids": [5, 6]}, params(max_tokens=200))
        next(stream)
        os.kill(pids[1], signal.SIGKILL)
        started = time.monotonic()
        processes: RankProcesses = pair.engine.runner._processes
        processes.pipes[0].send_bytes(pack(one_step()))  # it alone gets this far
        answer = unpack(processes.pipes[0].recv_bytes())
        assert isinstance(answer.error, GroupError) and str(answer.error).startswith("rank 0 in all_reduce: ")
        with pytest.raises(GroupError, match=r"^rank 1 \(process \d+\) was killed by SIGKILL") as raised:
            list(stream)
        assert time.monotonic() - started < SECONDS and "\n" not in str(raised.value)
        assert gone(pids)
        with pytest.raises(GroupError, match=r"the ranks have ended \(rank 1 .* SIGKILL.*\): make a new engine"):
            pair.generate({"prompt_token_ids": [5, 6]})

    def test_a_rank_that_raises_is_named_and_not_those_that_wait_for_it(self, pair, monkeypatch):
        """Rank 1 is told to copy a block that does not exist; rank 0 waits for it in its first collective."""
        send, pids = RankProcesses.send, pair.engine.runner.pids

        def send_badly(self: RankProcesses, step: Step) -> None:
            send(self, step, step._replace(output=step.output._replace(block_copies=((0, 10**9),))))

        monkeypatch.setattr(RankProcesses, "send", send_badly)
        with pytest.raises(GroupError, match=r"^rank 1 failed: IndexError: .*All ranks were ended") as raised:
            pair.generate({"prompt_token_ids": [5, 6]}, params())
        assert isinstance(raised.value.__cause__, IndexError)
        assert "copy_blocks" in raised.value.__cause__.__notes__[0]
        assert gone(pids)

    def test_an_interrupt_waits_for_the_step_and_one_that_hangs_ends_the_ranks(self, pair, alone, monkeypatch):
        engine, runner = pair.engine, pair.engine.runner
        answers, interrupted = RankProcesses.answers, threading.Event()

        def interrupt(self: RankProcesses) -> list[Any]:
            if not interrupted.is_set():
                interrupted.set()
                os.kill(os.getpid(), signal.SIGINT)
            return answers(self)

        monkeypatch.setattr(RankProcesses, "answers", interrupt)
        engine.add_request("0", {"prompt_token_ids": [5, 6]}, params())
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.abort("0")
        assert tokens(pair) == alone[LLAMA]

        monkeypatch.setattr("mini_engine.process_runner.INTERRUPTED_STEP_S", 0.2)
        os.kill(runner.pids[1], signal.SIGSTOP)
        interrupted.clear()
        with pytest.raises(KeyboardInterrupt):
            pair.generate({"prompt_token_ids": [5, 6]}, params())
        assert gone(runner.pids)
        with pytest.raises(GroupError, match="interrupted in a step"):
            pair.generate({"prompt_token_ids": [5, 6]}, params())

    def test_with_the_last_reference(self, models):
        llm = LLM(models[LLAMA], tensor_parallel_size=2)
        pids = llm.engine.runner.pids
        llm.generate({"prompt_token_ids": [5, 6]}, params())
        del llm
        gc.collect()
        assert gone(pids)


class TestWhoIsNamed:
    """Ranks that answer with errors, in the order in which they are told to."""

    def answers(self, *errors: tuple[int, Exception], pause_s: float = 0.1) -> RanksFailed:
        """What is raised. `self.told` is how many had been sent by then."""
        over, self.told = threading.Event(), 0
        processes = RankProcesses(0, {})
        pipes = [Pipe() for _ in errors]
        processes.pipes.extend(ours for ours, _ in pipes)

        def tell() -> None:
            with suppress(BrokenPipeError):  # nobody listens any more
                for rank, error in errors:
                    pipes[rank][1].send_bytes(pack(Answer(error=error)))
                    self.told += not over.is_set()
                    over.wait(pause_s)

        thread = threading.Thread(target=tell)
        thread.start()
        with pytest.raises(RanksFailed) as raised:
            processes.answers()
        over.set()
        thread.join()
        assert not processes.directory.exists()
        return raised.value

    def test_the_cause_though_a_consequence_is_heard_of_first(self):
        failed = self.answers((0, GroupError("peer has gone")), (2, GroupError("so it has")), (1, KeyError("a\nb")))
        assert str(failed) == r"rank 1 failed: KeyError: 'a\nb'" and failed.failure.rank == 1

    def test_a_cause_is_not_waited_for_longer_than_need_be(self, monkeypatch):
        monkeypatch.setattr("mini_engine.rank_processes.CULPRIT_S", 10**6)
        failed = self.answers((1, KeyError("lost")), (0, GroupError("too late")), pause_s=3)
        assert failed.failure.rank == 1 and self.told == 1

    def test_the_first_where_there_are_but_consequences(self, monkeypatch):
        monkeypatch.setattr("mini_engine.rank_processes.CULPRIT_S", 0.01)
        assert str(self.answers((1, GroupError("a\n b")), (0, GroupError("x")))) == "rank 1 failed: GroupError: a b"


SCRIPT = """
import sys
from mini_engine import LLM, SamplingParams

llm = LLM(sys.argv[1], tensor_parallel_size=2)
for delta in llm.stream("the cat", SamplingParams(max_tokens=250, ignore_eos=True)):
    print(*llm.engine.runner.pids, flush=True)
"""  # no `if __name__ == "__main__"`


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_takes_its_ranks_along(how, models, tmp_path):
    """SIGINT goes to the whole process group, as Ctrl-C does. What lies in the current directory is nobody's module."""
    script, temporary, elsewhere = tmp_path / "script" / "script.py", tmp_path / "temporary", tmp_path / "elsewhere"
    for directory in (script.parent, temporary, elsewhere):
        directory.mkdir()
    script.write_text(SCRIPT)
    (elsewhere / "random.py").write_text("raise ImportError")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    driver = subprocess.Popen(
        [sys.executable, str(script), models[LLAMA]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=elsewhere,
        start_new_session=True,
    )
    assert driver.stdout is not None and driver.stderr is not None
    pids = list(map(int, driver.stdout.readline().split()))
    assert len(pids) == 2, driver.stderr.read()
    os.killpg(driver.pid, how)
    _, err = driver.communicate(timeout=SECONDS)
    assert driver.returncode == -how and gone(pids)
    assert how == signal.SIGKILL or err.rstrip().endswith("KeyboardInterrupt")
    assert list(temporary.iterdir()) == []


class TestLoading:
    def test_what_a_rank_refuses_reaches_the_caller_as_it_is(self, models):
        options: dict[str, Any] = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 10}
        with pytest.raises(PoolTooSmall) as here:
            LLM(models[LLAMA], distributed_executor_backend="local", **options)
        with pytest.raises(PoolTooSmall) as there:
            LLM(models[LLAMA], **options)
        assert str(there.value) == str(here.value)

    def test_a_rank_that_is_killed_is_named(self, models, monkeypatch):
        started: list[int] = []

        def kill_one(self: RankProcesses, *messages: Any) -> None:
            started.extend(process.pid for process in self.processes)
            os.kill(started[0], signal.SIGKILL)

        monkeypatch.setattr(RankProcesses, "send", kill_one)
        with pytest.raises(GroupError, match=r"^rank 0 \(process \d+\) was killed by SIGKILL"):
            LLM(models[LLAMA], tensor_parallel_size=2)
        assert len(started) == 2 and gone(started)

    def test_a_process_that_cannot_start_says_why(self, tmp_path):
        """A broken package of the name hides the right one, which may be installed."""
        (tmp_path / "mini_engine").mkdir()
        (tmp_path / "mini_engine" / "__init__.py").write_text("import no_such_thing")
        processes = RankProcesses(1, {"PYTHONPATH": str(tmp_path)})
        with pytest.raises(
            RanksFailed, match=r"ended with status 1; the last it wrote: .*No module named 'no_such_thing'"
        ):
            processes.answers()

    @pytest.mark.parametrize(
        "options, says",
        [
            ({"tensor_parallel_size": 3}, "must divide the 4 query heads"),
            ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "2 KV heads have no copies"),
            ({"tensor_parallel_size": 2, "max_model_len": 9000}, "exceeds the 256 positions"),
            ({"tensor_parallel_size": 2, "device": "cuda"}, "device 'cuda' is not there|as many GPUs"),
        ],
    )
    def test_what_does_not_fit_the_model_starts_no_process(self, options, says, models, monkeypatch):
        monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
        if torch.cuda.device_count() > 1 and "device" in options:
            pytest.skip("there are GPUs for it")
        with pytest.raises(ConfigError, match=says):
            LLM(models[LLAMA], **options)

    def test_too_few_gpus(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        check_num_gpus(torch.device("cuda"), 2)
        check_num_gpus(torch.device("cpu"), 9)
        with pytest.raises(ConfigError, match="3 ranks need as many GPUs, PyTorch sees 2"):
            check_num_gpus(torch.device("cuda"), 3)


def test_each_rank_gets_its_share_of_the_threads(models, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    sent: list[Any] = []

    def stop(self: RankProcesses, *messages: Any) -> None:
        sent.extend(messages)
        raise RuntimeError("seen")

    monkeypatch.setattr(RankProcesses, "send", stop)
    with pytest.raises(RuntimeError, match="seen"):
        LLM(EngineConfig(models[LLAMA], tensor_parallel_size=2))
    assert [(setup.rank, setup.num_threads) for setup in sent] == [(0, 3), (1, 3)]
