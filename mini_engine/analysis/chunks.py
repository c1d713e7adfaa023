"""Prefill in chunks: what cutting costs, and the largest chunk that keeps a promised output gap (book 8.2.3, 8.2.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mini_engine.analysis.fitted import Chunk
from mini_engine.analysis.inputs import AnalysisError, positive, whole


def split_prompt(prompt: int, chunk: int, history: int = 0) -> tuple[Chunk, ...]:
    """The chunks of a prompt of `prompt` tokens, of `chunk` tokens each and a smaller last one."""
    whole(1, prompt=prompt, chunk=chunk)
    whole(0, history=history)
    return tuple(Chunk(min(chunk, prompt - done), history + done) for done in range(0, prompt, chunk))


def repeated_read_bytes(weight_bytes: int, tokens: int, chunk: int) -> int:
    """Bytes of weights read when `tokens` are computed in chunks: once for each chunk (book 8.2.3)."""
    whole(0, weight_bytes=weight_bytes)
    return weight_bytes * len(split_prompt(tokens, chunk))


def largest_chunk(
    seconds: Callable[[Iterable[Chunk]], float],
    gap_s: float,
    history: int = 0,
    decode_contexts: Iterable[int] = (),
    limit: int = 8192,
) -> int:
    """Most prefill tokens a round may take so that it ends within `gap_s`; 0 if not even one.

    seconds: price of a round, such as `BOOK_STEP.seconds`; it must not fall as a chunk grows. Its graph shapes count.
    history: tokens of the prompt already cached. The longer it is, the smaller the chunk.
    decode_contexts: cached tokens of each running request, all of which decode in the same round.
    limit: where to stop looking, say the prompt that is left or the token budget less the decodes.
    Raises AnalysisError if the decodes alone take longer than the gap, since no chunk size would help.
    Source: book 8.2.4, gap → round time → tokens.
    """
    positive(gap_s=gap_s)
    whole(0, limit=limit)
    decodes = tuple(Chunk(1, context) for context in decode_contexts)
    if decodes and seconds(decodes) > gap_s:
        raise AnalysisError(
            f"the {len(decodes)} decodes alone take {seconds(decodes) * 1e3:.2f} ms, more than the gap of "
            f"{gap_s * 1e3:.2f} ms: no chunk is small enough; run fewer requests or allow a longer gap"
        )
    fits, too_long = 0, limit + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if seconds((*decodes, Chunk(middle, history))) <= gap_s:
            fits = middle
        else:
            too_long = middle
    return fits
