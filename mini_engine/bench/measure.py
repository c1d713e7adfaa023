"""What this machine makes of the engine, every figure beside its bound or a peer: `mini-engine bench`.

One process, warm-up, medians. A ratio to a peer is taken from runs that alternate, so that a machine that drifts
drifts for both. Seconds say something about the machine they were taken on, so its read rate is measured too: a decode
step must read every weight once, which no engine does faster than the machine reads (book 8.2.1).
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import torch
from tqdm.auto import tqdm

from mini_engine import sizing
from mini_engine.bench.peers import transformers_twin
from mini_engine.bench.rows import row
from mini_engine.config import EngineConfig, SchedulerConfig
from mini_engine.info import commit, device_name, versions
from mini_engine.llm import LLM
from mini_engine.output_processor import RequestOutput
from mini_engine.scheduler import Scheduler
from mini_engine.sequence import SamplingParams, Sequence

GB = 1e9
MIB = 1 << 20
READ_BUFFER_BYTES = 1 << 29
BATCHES = (1, 16)
PREFILL_TOKENS = 1024
SCHEDULED_SEQUENCES = (1, 64, 256)


def run(config: EngineConfig, input_len: int, output_len: int, repeats: int, peers: bool = True) -> dict[str, Any]:
    """All figures, as a JSON-able dictionary: `machine`, `versions`, `settings`, and `figures`, a list of rows.

    The rows are those of `bench.rows.row`. On a GPU those of `bench.gpu` come last.
    """
    figures: list[dict[str, Any]] = []
    on_gpu = sizing.resolve_device(config.device).type == "cuda"
    with tqdm(total=5 + on_gpu, desc="bench: start and memory", file=sys.stderr) as bar:

        def take(rows: Iterable[dict[str, Any]], then: str) -> None:
            figures.extend(rows)
            bar.update()
            bar.set_description(f"bench: {then}")

        take(start_and_memory(config), then="scheduler")
        take(scheduler_time(), then="loading")
        llm = LLM(config, enable_prefix_caching=False)
        rate = read_rate(llm.engine.runner.device, repeats)
        figures.append(row("read rate", rate / GB, "GB/s", "sum of a touched 512 MiB float32 buffer"))
        peer = transformers_twin(llm.engine.runner.model) if peers else None
        bar.set_description("bench: decode")
        take(decode(llm, rate, input_len, output_len, repeats), then="prefill")
        take(prefill(llm, repeats), then="whole requests" + (" beside transformers" if peer else ""))
        take(whole_requests(llm, peer, input_len, output_len, repeats), then="kernels" if on_gpu else "done")
        if on_gpu:
            from mini_engine.bench import gpu  # triton is there only with a GPU's build of torch

            take(gpu.rows(llm.engine.runner.device, gpu.cuda_timer), then="done")
    return {
        "title": f"{llm.engine.name}, dtype {config.dtype}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": {"device": device_name(llm.engine.runner.device), "threads": torch.get_num_threads()},
        "versions": versions(),
        "settings": {
            "model": llm.engine.name,
            "dtype": str(llm.engine.runner.dtype).removeprefix("torch."),
            "input_len": input_len,
            "output_len": output_len,
            "repeats": repeats,
        },
        "figures": figures,
    }


def read_rate(device: torch.device, repeats: int) -> float:
    """Bytes a second this device reads from memory."""
    buffer = torch.ones(READ_BUFFER_BYTES // 4, device=device)  # ones: untouched memory would all be the zero page
    return READ_BUFFER_BYTES / median(_seconds(buffer.sum, repeats, device))


def decode(llm: LLM, rate: float, input_len: int, output_len: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Tokens a second of steps that only decode, at each batch size, against the bound by bytes read."""
    for batch in BATCHES:
        _generate(llm, batch, input_len, 4)
        steps: list[float] = []
        for _ in range(repeats):
            records = _generate(llm, batch, input_len, output_len)
            steps += [gap for record in records[:1] for gap in record.metrics.itl]
        context = input_len + output_len // 2
        kv_bytes = batch * context * llm.engine.runner.kv.bytes_per_token
        bound = batch * rate / (llm.engine.runner.model.read_bytes() + kv_bytes)
        value = batch / median(steps)
        yield row(
            f"decode, batch {batch}",
            value,
            "tok/s",
            "batch / median time between tokens, prefill left out; bound: weights and KV read once a step",
            bound,
        )


def prefill(llm: LLM, repeats: int) -> Iterator[dict[str, Any]]:
    tokens = min(PREFILL_TOKENS, llm.engine.runner.max_model_len)
    _generate(llm, 1, tokens, 1)
    times = [_generate(llm, 1, tokens, 1)[0].metrics.ttft or 0.0 for _ in range(repeats)]
    yield row("prefill", tokens / median(times), "tok/s", f"{tokens} tokens / median time to first token")


def whole_requests(llm: LLM, peer: Any, input_len: int, output_len: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Output tokens a second of whole requests, prefill included; transformers' generate in alternating runs."""
    device = llm.engine.runner.device
    for batch in BATCHES:
        ids = torch.tensor([_prompt(llm, i, input_len) for i in range(batch)], device=device)

        def ours(batch: int = batch) -> None:
            _generate(llm, batch, input_len, output_len)

        def theirs(ids: torch.Tensor = ids) -> None:
            settings = {"max_new_tokens": output_len, "min_new_tokens": output_len, "do_sample": False}
            peer.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)

        ours()
        beside: dict[str, Any] = {}
        if peer is None:
            seconds = median(_seconds(ours, repeats, device))
        else:
            theirs()
            pairs = [(_seconds(ours, 1, device)[0], _seconds(theirs, 1, device)[0]) for _ in range(repeats)]
            seconds = median(own for own, _ in pairs)
            beside = {
                "peer": ("transformers", batch * output_len / median(other for _, other in pairs)),
                "ratio": median(other / own for own, other in pairs),
            }
        yield row(
            f"whole requests, batch {batch}",
            batch * output_len / seconds,
            "tok/s",
            "output tokens / time of the batch, prefill included; same weights, same dtype, alternating runs",
            **beside,
        )


def scheduler_time() -> Iterator[dict[str, Any]]:
    """Microseconds of schedule + update per running sequence and step, in steps that only decode."""
    for count in SCHEDULED_SEQUENCES:
        blocks = 2 + count * 20
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=count, num_blocks=blocks, max_num_batched_tokens=1 << 16))
        params = SamplingParams(max_tokens=180, ignore_eos=True)
        for i in range(count):
            scheduler.add(Sequence(str(i), [i * 1000 + j for j in range(128)], params))
        times = []
        while scheduler.has_unfinished():
            start = time.perf_counter()
            output = scheduler.schedule()
            scheduled = time.perf_counter()
            tokens = [1] * len(output.sampled)
            drawn = time.perf_counter()
            scheduler.update(output, tokens)
            times.append(scheduled - start + time.perf_counter() - drawn)
        yield row(
            f"scheduler, {count} running",
            median(times[5:-1]) / count * 1e6,
            "µs",
            "median of schedule + update per running sequence and step",
        )


def start_and_memory(config: EngineConfig) -> Iterator[dict[str, Any]]:
    """A fresh process: time from its start to the first token, and its memory above that of `import torch`."""
    command = [sys.executable, "-m", "mini_engine.bench.fresh_process", json.dumps(dataclasses.asdict(config))]
    subprocess.run(command, capture_output=True, check=True)  # warms the page cache
    start = time.time()
    child = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    how = "new process with a warm page cache; imports, loading and a prefill of 128 tokens included"
    yield row("start to first token", child["first_token"] - start, "s", how)
    used, weights = (child["peak"] - child["base"]) / MIB, child["weights"] / MIB
    how = "peak resident memory of loading and of 128 + 32 tokens; bound: the weights as held"
    yield row("memory above import torch", used, "MiB", how, weights if used else None, less_is_better=True)


def _generate(llm: LLM, batch: int, input_len: int, output_len: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": _prompt(llm, i, input_len)} for i in range(batch)], params)


def _prompt(llm: LLM, i: int, length: int) -> list[int]:
    """A prompt that differs from all others from its first token on."""
    return [(7919 * (i + 1) + 31 * j) % llm.engine.model_config.vocab_size for j in range(length)]


def _seconds(work: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each of `repeats` runs after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times[1:]
