"""What a fresh process pays: `python -m mini_engine.bench.fresh_process '{"model": "smollm2-135m"}'`.

Loads a model, answers 128 tokens with 32, and prints JSON: when the first token came (seconds since the epoch), the
peak memory after `import torch` and at the end, and the bytes of the weights as held.
"""

from __future__ import annotations

import json
import resource
import sys
import time


def main() -> None:
    import torch  # noqa: F401  what comes before is torch's, what comes after is ours

    base = _peak_bytes()
    from mini_engine.llm import LLM
    from mini_engine.sequence import SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    prompt = {"prompt_token_ids": [1 + i % 99 for i in range(128)]}
    stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    next(stream)
    first_token = time.time()
    list(stream)
    weights = llm.engine.runner.weight_bytes
    report = {"first_token": first_token, "base": base, "peak": _peak_bytes(), "weights": weights}
    print(json.dumps(report))


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
