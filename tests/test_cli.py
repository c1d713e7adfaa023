"""The command line as a person uses it: in its own process where that matters."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.cli import main
from tests.builders import tiny_llama_dir, tiny_qwen3_dir, to_gguf

COMMAND = [sys.executable, "-m", "mini_engine"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(args)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


class TestGenerate:
    def test_prints_the_text_then_the_timings(self, model: str, capsys) -> None:
        status, out, err = run("generate", "--prompt", "the cat", "--model", model, "--max-tokens", "9", capsys=capsys)
        params = SamplingParams(temperature=0, max_tokens=9)
        assert (status, out) == (0, LLM(model).generate("the cat", params)[0].outputs[0].text + "\n")
        assert all(word in err for word in ("TTFT", "ITL", "tok/s"))

    def test_every_option_arrives(self, model: str, capsys) -> None:
        options = "--max-tokens 20 --temperature 1.5 --top-k 40 --top-p 0.9 --seed 3 --dtype bfloat16"
        args = ["generate", "--chat", "--prompt", "the cat", "--model", model, "--stop", "é", "--stop", "fox"]
        status, out, _ = run(*args, *options.split(), capsys=capsys)
        params = SamplingParams(temperature=1.5, top_k=40, top_p=0.9, seed=3, max_tokens=20, stop=["é", "fox"])
        llm = LLM(model, dtype="bfloat16")
        expected = llm.chat([{"role": "user", "content": "the cat"}], params)[0].outputs[0].text
        assert (status, out) == (0, expected + "\n")

    def test_reads_the_prompt_from_standard_input(self, model: str) -> None:
        args = [*COMMAND, "generate", "--prompt", "-", "--model", model, "--max-tokens", "4"]
        piped = subprocess.run(args, input="the cat", capture_output=True, text=True)
        args[args.index("-")] = "the cat"
        assert piped.stdout == subprocess.run(args, capture_output=True, text=True).stdout != ""

    def test_gguf_and_qwen3(self, model: str, tmp_path: Path, capsys) -> None:
        file = to_gguf(Path(model), tmp_path / "tiny.gguf")
        texts = {
            run("generate", "--prompt", "the cat", "--model", str(where), "--max-tokens", "8", capsys=capsys)[1]
            for where in (model, file)
        }
        assert len(texts) == 1
        qwen = str(tiny_qwen3_dir(tmp_path))
        assert run("generate", "--prompt", "the cat", "--model", qwen, "--max-tokens", "8", capsys=capsys)[0] == 0

    def test_control_c_ends_cleanly(self) -> None:
        args = [*COMMAND, "generate", "--prompt", "Once upon a time", "--max-tokens", "5000", "--temperature", "1"]
        process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.read(1)  # it is answering
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert out.endswith(b"\n")
        assert b"interrupted; TTFT" in err and b"Traceback" not in err

    def test_control_c_while_loading(self) -> None:
        process = subprocess.Popen([*COMMAND, "generate", "--prompt", "x"], stderr=subprocess.PIPE)
        time.sleep(0.6)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (130, -signal.SIGINT)
        assert b"mini_engine/" not in err or b"Traceback" not in err

    @pytest.mark.skipif(os.name != "posix", reason="needs POSIX pipes")
    def test_a_reader_that_leaves_is_no_error(self, model: str) -> None:
        args = shlex.join([*COMMAND, "generate", "--prompt", "cat", "--model", model, "--max-tokens", "200"])
        shell = ["bash", "-c", f"set -o pipefail; {args} | head -c 1 > /dev/null; echo ${{PIPESTATUS[0]}}"]
        done = subprocess.run(shell, capture_output=True, text=True)
        assert done.stdout.strip() in ("0", "141") and "Traceback" not in done.stderr


class TestInfo:
    def test_block_arithmetic(self, model: str, capsys) -> None:
        options = "--input-len 30 --output-len 20 --block-size 8 --kv-cache-memory-bytes 1000000 --json"
        status, out, _ = run("info", "--model", model, *options.split(), capsys=capsys)
        report = json.loads(out)
        per_token = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head size, float32
        assert status == 0
        assert report["model"]["kv_bytes_per_token"] == per_token
        assert report["kv_cache"]["num_blocks"] == 1_000_000 // (8 * per_token)
        assert report["requests"]["blocks_each"] == 7  # 30 + 20 - 1 = 49 tokens
        assert report["requests"]["fit"] == (report["kv_cache"]["num_blocks"] - 1) // 7
        assert report["versions"].keys() >= {"python", "torch", "mini_engine"}

    def test_so_many_fit_and_not_one_more(self, model: str, capsys) -> None:
        options = ["--model", model, "--input-len", "30", "--output-len", "20", "--kv-cache-memory-bytes", "70000"]
        fit = json.loads(run("info", *options, "--json", capsys=capsys)[1])["requests"]["fit"]
        assert fit > 0
        llm = LLM(model, kv_cache_memory_bytes=70_000, admission="reserve", enable_prefix_caching=False)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        for i in range(fit + 1):
            llm.engine.add_request(str(i), {"prompt_token_ids": [5 + i] * 30}, params)
        llm.engine.step()
        assert len(llm.engine.scheduler.running) == fit

    @pytest.mark.parametrize("name", [None, "smollm2-135m"])
    def test_weights_are_what_the_engine_holds(self, model: str, name: str | None, capsys) -> None:
        report = json.loads(run("info", "--model", name or model, "--json", capsys=capsys)[1])
        runner = LLM(name or model).engine.runner
        assert report["model"]["weight_bytes"] == runner.weight_bytes
        assert report["kv_cache"]["bytes"] == runner.kv.nbytes

    def test_table_and_too_long_a_shape(self, model: str, capsys) -> None:
        status, out, _ = run("info", "--model", model, "--input-len", "5000", capsys=capsys)
        assert status == 0
        assert "0 of 5,000 in + 256 out fit" in out and "too short for this shape" in out


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        (["--model", "nosuchmodel"], "no model 'nosuchmodel'"),
        (["--model", "./missing.gguf"], "no model './missing.gguf'"),
        (["--model", "some-owner/some-model"], "some-owner/some-model"),
        (["--prompt", ""], "the prompt is empty"),
        (["--temperature", "-1"], "temperature must be a finite number of at least 0, got -1.0"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "0"], "top_p must lie in (0, 1], got 0.0"),
        (["--top-k", "-5"], "top_k must be a whole number of at least -1, got -5"),
        (["--max-tokens", "0"], "max_tokens must be a whole number of at least 1, got 0"),
        (["--seed", "-3"], "seed"),
        (["--stop", ""], "stop must be"),
        (["--max-tokens", "9000"], "exceed max_model_len 256"),
        (["--max-model-len", "9000"], "max_model_len 9000 exceeds the 256 positions"),
        (["--kv-cache-memory-bytes", "40000", "--max-tokens", "100"], "the pool has"),
        (["--kv-cache-memory-bytes", "10"], "Raise kv_cache_memory_bytes"),
        (["--block-size", "0"], "block_size must be a whole number of at least 1, got 0"),
        (["--device", "cuda"], "device 'cuda' is not there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_2(args: list[str], cause: str, model: str, capsys) -> None:
    status, out, err = run("generate", "--prompt", "the cat", "--model", model, *args, capsys=capsys)
    assert (status, out) == (2, "")
    assert err.startswith("mini-engine: ") and err.count("\n") == 1
    assert cause in err


def test_a_refusal_from_a_shell_has_no_traceback() -> None:
    done = subprocess.run([*COMMAND, "generate", "--prompt", "x", "--model", "nope"], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [[], ["generate"], ["info"], ["bench"], ["kernels"], ["simulate"]])
def test_help_shows_an_example(command: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--help"])
    assert exit_info.value.code == 0
    assert "example: mini-engine" in capsys.readouterr().out
