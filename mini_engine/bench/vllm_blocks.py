"""The work of `blocks.py` on vLLM's block manager, which runs on a CPU and without a model. Needs vLLM.

vLLM hashes a request's blocks in the request, with SHA-256 unless told otherwise, and looks them up in the manager.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from mini_engine.bench.blocks import APPENDED, BLOCK, PROMPT, medians, prompt_tokens


def measure(repeats: int) -> dict[str, float]:
    """Seconds for each kind of work on one prompt, under the names of `blocks.measure`."""
    return medians(_work(repeat) for repeat in range(repeats))


def _work(repeat: int) -> Iterator[tuple[str, Callable[[], object]]]:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    hasher, manager = get_request_block_hasher(BLOCK, sha256), _manager(3 * PROMPT // BLOCK)
    request, again = _request("r", repeat, None), _request("again", repeat, hasher)
    request._block_hasher = hasher  # given to the constructor, it would hash at once and not be timed
    yield "hash", request.update_block_hashes

    def allocate() -> None:
        found, num_found, *_ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, PROMPT - num_found, num_found, found)
        request.num_computed_tokens = PROMPT

    def append() -> None:
        for token in range(APPENDED):
            request.append_output_token_ids(token)
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1

    yield "allocate", allocate
    yield "look up", lambda: manager.get_computed_blocks(again)
    yield "append", append
    yield "free", lambda: manager.free(request)


def _manager(num_blocks: int) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    options = {"max_model_len": 2 * PROMPT, "hash_block_size": BLOCK, "scheduler_block_size": BLOCK}
    known = inspect.signature(KVCacheManager).parameters  # which of the sizes it takes differs between releases
    return KVCacheManager(config, enable_caching=True, **{k: v for k, v in options.items() if k in known})


def _request(name: str, repeat: int, hasher: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=APPENDED, ignore_eos=True)
    options = {"eos_token_id": None, "pooling_params": None, "block_hasher": hasher}
    known = inspect.signature(Request).parameters
    return Request(
        request_id=name, prompt_token_ids=prompt_tokens(repeat), sampling_params=params,
        **{k: v for k, v in options.items() if k in known},
    )  # fmt: skip
