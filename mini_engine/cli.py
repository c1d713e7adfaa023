"""The `mini-engine` command: generate, serve, info, bench, ledger, kernels, simulate, policies.

Exit status: 0 done, 1 nothing wrong with the command but the answer is no, 2 a refusal, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence as Seq

from mini_engine.config import DTYPE_BYTES, EngineConfig
from mini_engine.engine_options import PARALLEL, SERVING, add_engine_options, given_options
from mini_engine.errors import ConfigError, EngineError

INTERRUPTED = 130


def main(argv: Seq[str] | None = None) -> int:
    """Run one command. Deliberate refusals are one line on stderr, without a traceback."""
    try:
        args = build_parser().parse_args(argv)
        return args.run(args)
    except EngineError as error:
        print(f"mini-engine: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmini-engine: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, `head` say, has left: let Python's own shutdown flush to nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mini-engine",
        description="A small inference engine that serves a real model.",
        epilog='example: mini-engine generate --chat --prompt "What is a KV cache?"',
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_serve(commands)
    _add_info(commands)
    _add_bench(commands)
    _add_ledger(commands)
    _add_kernels(commands)
    _add_simulate(commands)
    _add_policies(commands)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        metavar="smollm2-135m|DIR|HF_ID|FILE.gguf",
        help="the embedded model, a directory, a GGUF file or a Hugging Face repository (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPE_BYTES], help="default: %(default)s")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="default: %(default)s")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest prompt plus output")
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument("--kv-cache-memory-bytes", type=int, metavar="BYTES", help="size of the KV pool")


def _add_generate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer one prompt, as it is written",
        description="Answer one prompt and stream the text; timings come last, on stderr.",
        epilog='example: mini-engine generate --chat --prompt "Name three primes." --max-tokens 40',
    )
    parser.add_argument("--prompt", required=True, help="the text, or - to read it from standard input")
    parser.add_argument("--chat", action="store_true", help="ask it as a question, through the model's chat template")
    _add_model(parser)
    add_engine_options(parser, *PARALLEL)
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: %(default)s")
    parser.add_argument("--seed", type=int, metavar="N", help="makes a random answer repeatable")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly")
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    from mini_engine.llm import LLM
    from mini_engine.sequence import SamplingParams

    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=args.stop,
    )
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    llm = LLM(_engine_config(args))
    prompt = llm.chat_prompt([{"role": "user", "content": text}]) if args.chat else text
    stream = llm.stream(prompt, params)
    status = 0
    try:
        for delta in stream:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        stream.close()
    print()
    metrics = stream.record.metrics
    print(f"[{'interrupted; ' if status else ''}{metrics.summary()}]", file=sys.stderr)
    return status


def _add_serve(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="answer over HTTP, as OpenAI's API does",
        description="Serve completions and chat over HTTP until Ctrl-C, for any OpenAI client.",
        epilog="""example: mini-engine serve --port 8000, then: curl http://127.0.0.1:8000/v1/completions -d
        '{"prompt": "The capital of France is", "temperature": 0, "stream": true}'""",
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: %(default)s, this machine")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 is any free one (default: %(default)s)")
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model (default: --model)")
    _add_model(parser)
    add_engine_options(parser, *SERVING, *PARALLEL)
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    try:
        from mini_engine.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mini_engine"):
            raise
        raise ConfigError(f"serving needs {error.name}: pip install fastapi uvicorn (the extra `server`)") from None
    return serve(_engine_config(args), args.host, args.port, args.served_model_name)


def _add_info(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "info",
        help="versions, device, model memory, and how many requests fit",
        description="What an engine with these settings would be: nothing is loaded but the model's header.",
        epilog="example: mini-engine info --input-len 2048 --output-len 256 --kv-cache-memory-bytes 2000000000",
    )
    _add_model(parser)
    add_engine_options(parser, *PARALLEL)
    parser.add_argument("--input-len", type=int, default=2048, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument("--output-len", type=int, default=256, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_info)


def _info(args: argparse.Namespace) -> int:
    import json

    from mini_engine.info import describe, table

    report = describe(_engine_config(args), args.input_len, args.output_len)
    print(json.dumps(report, indent=2) if args.json else table(report))
    return 0


def _add_bench(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure this machine: speed, scheduler, memory, start",
        description="Measure in one process, with warm-up and medians, beside transformers where it is installed.",
        epilog="example: mini-engine bench --json > bench.json",
    )
    _add_model(parser)
    parser.add_argument("--input-len", type=int, default=128, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument("--output-len", type=int, default=64, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="runs a median is of (default: %(default)s)"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out, which takes half of the time")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    import json

    import torch

    from mini_engine.bench.measure import run
    from mini_engine.bench.rows import table

    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"skipped: no CUDA device (PyTorch {torch.__version__})", file=sys.stderr)
        return 0
    report = run(_engine_config(args), args.input_len, args.output_len, args.repeats, peers=not args.no_peers)
    print(json.dumps(report, indent=2) if args.json else table(report))
    return 0


def _add_ledger(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "ledger",
        help="write docs/performance.md from the JSON of benches",
        description="Write the ledger of measured figures from bench reports, and from what was tried without gain.",
        epilog="example: mini-engine ledger docs/bench --out docs/performance.md",
    )
    parser.add_argument("directory", metavar="DIR", help="holds the reports, *.json, and tried.toml")
    parser.add_argument("--out", metavar="FILE.md", help="where to write (default: standard output)")
    parser.set_defaults(run=_ledger)


def _ledger(args: argparse.Namespace) -> int:
    from pathlib import Path

    from mini_engine.bench.ledger import ledger

    text = ledger(Path(args.directory))
    if args.out:
        Path(args.out).write_text(text)
    else:
        print(text, end="")
    return 0


def _add_kernels(commands: argparse._SubParsersAction) -> None:
    from mini_engine.kernels import gates

    parser = commands.add_parser(
        "kernels",
        help="what the compiler makes of every kernel: registers, spills, loads, tensor cores",
        description="Compile every Triton kernel ahead of time, without a GPU, and tabulate what is in the binary.",
        epilog="example: mini-engine kernels --arch sm_120",
    )
    gates.add_arguments(parser)
    parser.set_defaults(run=gates.run)


def _add_simulate(commands: argparse._SubParsersAction) -> None:
    from mini_engine.simulator import cli as simulator

    parser = commands.add_parser(
        "simulate",
        help="replay a workload with the real scheduler on a virtual clock",
        description="Replay a trace, or the book's four requests, with the real scheduler on a virtual clock.",
        epilog="example: mini-engine simulate --policy chunked --plot gantt.svg",
    )
    simulator.add_arguments(parser)
    parser.set_defaults(run=simulator.run)


def _add_policies(commands: argparse._SubParsersAction) -> None:
    from mini_engine.simulator import policies

    parser = commands.add_parser(
        "policies",
        help="compare eviction policies and a host tier on a trace",
        description="Replay a trace's prompts against the real block pool under several eviction policies.",
        epilog="example: mini-engine policies --pool-gib 16 --host-gib 64 --admission second_sight",
    )
    policies.add_arguments(parser)
    parser.set_defaults(run=policies.run)


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=args.model,
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        **given_options(args),
    )
