"""The same engine in every process that torchrun starts: all get the tokens of one process, and no rank waits for one
that failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mini_engine import LLM
from tests.builders import tiny_llama_dir
from tests.rank_cases import tokens

WORKER = Path(__file__).with_name("tp_worker.py")
SECONDS = 120  # to start, on a busy machine; well below the 300 that a rank would wait for another


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


def torchrun(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", str(WORKER)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.parametrize(
    "size, options",
    [(2, {"num_gpu_blocks_override": 18}), (4, {"num_gpu_blocks_override": 11, "decode_context_parallel_size": 2})],
)
def test_every_rank_gets_the_tokens_of_one_process(size, options, model):
    done = torchrun(size, model, json.dumps(options))
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(each["rank"] for each in found) == list(range(size))
    expected = tokens(LLM(model, dtype="float32", block_size=4))
    for each in found:
        assert each["tokens"] == expected and each["num_preemptions"] > 0


def test_a_rank_that_raises_ends_the_others(model):
    done = torchrun(2, model, "fail")
    assert done.returncode != 0 and "this rank has had enough" in done.stderr


def test_a_rank_leaves_its_group_when_it_ends():
    """What was registered first is called last: after the group has been left."""
    code = (
        "import atexit, torch.distributed as dist\n"
        "atexit.register(lambda: print('in a group:', dist.is_initialized()))\n"
        "from mini_engine.torch_group import TorchGroup\n"
        "assert TorchGroup.from_environment('gloo').size == 1 and dist.is_initialized()"
    )
    alone = ["--standalone", "--nproc-per-node=1", "--no-python", sys.executable, "-c", code]
    command = [sys.executable, "-m", "torch.distributed.run", *alone]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0 and "in a group: False" in done.stdout, done.stdout + done.stderr[-3000:]
