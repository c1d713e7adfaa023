"""A sequence whose tokens nobody knows, only how many there are and which blocks of them are equal.

The scheduler counts tokens and the block manager compares the content of blocks; neither looks at a token. So a
replayed request needs one byte for each token it stands for, and one id for each block of a trace.
"""

from __future__ import annotations

from typing import cast

from mini_engine.sequence import SamplingParams, Sequence
from mini_engine.simulator.workloads import Request

UNKNOWN_TOKEN = 0
_BY_IDS, _OWN = 0, 1


class ReplaySequence(Sequence):
    """The `Sequence` of a workload's request, for the real scheduler.

    number: its place in the workload; makes content that no id describes different from everyone else's.
    """

    __slots__ = ("number", "request")

    def __init__(self, request: Request, number: int):
        # A bytearray has a list's len(), append() and slices at an eighth of the memory: thousands of long prompts
        # may be waiting at once.
        tokens = cast("list[int]", bytearray(request.num_prompt_tokens))
        params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
        super().__init__(request.request_id, tokens, params, priority=request.priority)
        self.request = request
        self.number = number

    def block_content(self, start: int, stop: int) -> tuple[int, ...]:
        """The ids that cover the tokens `start` to `stop - 1`, so the scheduler's blocks may be smaller or larger than
        the trace's. A block that is not covered to its end (the rest of a prompt, the output) is this sequence's alone.

        Blocks of one id that stand at different places stay apart all the same: a block's hash holds its parent's.
        """
        request = self.request
        if stop > request.num_known_tokens:
            return (_OWN, self.number)
        return (_BY_IDS, *request.block_ids[start // request.block_size : -(-stop // request.block_size)])
