"""What a request needs before it may start, and what no amount of waiting would give it (book 8.1.2)."""

from __future__ import annotations

from mini_engine.block_manager import BlockManager
from mini_engine.config import SchedulerConfig
from mini_engine.errors import PoolTooSmall, RequestError
from mini_engine.sequence import Sequence


def refuse_unservable(seq: Sequence, config: SchedulerConfig, blocks: BlockManager) -> None:
    """Raise RequestError or PoolTooSmall, with the numbers, if no amount of waiting would let `seq` finish."""
    prompt, output = seq.num_prompt_tokens, seq.max_tokens
    if prompt == 0:
        raise RequestError("the prompt is empty: it needs at least one token")
    if seq.num_tokens_to_finish > config.max_model_len:
        fits = config.max_model_len - prompt + 1
        raise RequestError(
            f"{prompt} prompt + {output} output tokens exceed max_model_len {config.max_model_len}: "
            + (f"ask for at most {fits} output tokens" if fits > 0 else "shorten the prompt")
        )
    if 1 + seq.num_forks > config.max_num_seqs:
        raise RequestError(
            f"n={1 + seq.num_forks} outputs exceed max_num_seqs {config.max_num_seqs}: lower n, or raise max_num_seqs"
        )
    needed, usable, size = blocks_to_finish(seq, config, blocks), blocks.num_usable_blocks, config.block_size
    if needed > usable:
        raise PoolTooSmall(
            f"the request needs {needed} blocks of {size} tokens ({prompt} prompt + {output} output), the pool has "
            f"{usable}. Ask for at most {usable * size + 1} tokens in all, or give the pool {needed + 1} blocks "
            f"(kv_cache_memory_bytes or num_gpu_blocks_override; the null block is one of them)"
        )


def blocks_to_finish(seq: Sequence, config: SchedulerConfig, blocks: BlockManager) -> int:
    """Blocks `seq` needs at its end, with all siblings still to branch off.

    When blocks are not reserved, siblings may wait for one another, so only one of them has to fit.
    """
    last = blocks.blocks_for(seq.num_tokens_to_finish)
    if config.admission != "reserve":
        return last
    shared = seq.num_prompt_tokens // blocks.block_size
    return last + seq.num_forks * (last - shared) + blocks.needs_copy(seq)
