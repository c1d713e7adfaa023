"""A replayed sequence finds the prefixes that one with real tokens would find."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mini_engine.block_manager import BlockManager
from mini_engine.sequence import SamplingParams, Sequence
from mini_engine.simulator.replay import ReplaySequence
from mini_engine.simulator.workloads import Request


def explicit(request: Request, number: int) -> Sequence:
    """The same request with every token spelled out: one number for each (id, offset), others for what no id covers."""
    tokens = []
    for position in range(request.num_prompt_tokens):
        if position < request.num_known_tokens:
            block, offset = divmod(position, request.block_size)
            tokens.append(1_000 * request.block_ids[block] + offset)
        else:
            tokens.append(-(1_000_000 * (number + 1) + position))
    return Sequence(request.request_id, tokens, SamplingParams(max_tokens=request.num_output_tokens))


def hits(sequences: list[Sequence], block_size: int) -> list[int]:
    """Prefix blocks each sequence finds when they run one after another in a pool that never fills."""
    blocks = BlockManager(400, block_size)
    found = []
    for seq in sequences:
        known = blocks.match_prefix(seq)
        found.append(len(known))
        blocks.admit(seq, known)
        for output in range(seq.max_tokens):
            seq.token_ids.append(output)
            assert blocks.grow(seq, seq.num_tokens) == ()
        seq.num_computed_tokens = seq.num_tokens
        blocks.cache_full_blocks(seq, 0, seq.num_tokens // block_size)
        blocks.check([seq])
        blocks.free(seq)
    return found


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    size = draw(st.sampled_from([4, 6, 16]))
    requests = []
    for i in range(draw(st.integers(2, 6))):
        ids = tuple(draw(st.lists(st.integers(1, 3), max_size=6)))
        # Both formats: ids that cover a little more than the prompt (Mooncake) or a little less (agent sessions).
        prompt = max(1, len(ids) * size + draw(st.integers(1 - size, size - 1)))
        requests.append(Request(f"r{i}", 0.0, prompt, draw(st.integers(1, 2)), ids, size if ids else 0))
    return requests


@given(workloads(), st.sampled_from([2, 4, 5, 12]))
def test_prefix_hits_are_those_of_explicit_tokens(requests, block_size):
    replayed: list[Sequence] = [ReplaySequence(request, i) for i, request in enumerate(requests)]
    spelled = [explicit(request, i) for i, request in enumerate(requests)]
    # The oracle's outputs would match where two prompts are equal and outputs too; a replay knows no outputs.
    for i, seq in enumerate(spelled):
        seq.token_ids = _OwnOutput(seq.token_ids, 50_000_000 + 100 * i)
    assert hits(replayed, block_size) == hits(spelled, block_size)


class _OwnOutput(list):
    """A token list whose appended tokens are nobody else's."""

    def __init__(self, tokens: list[int], first: int):
        super().__init__(tokens)
        self.first = first

    def append(self, token: int) -> None:
        super().append(self.first + token)


def test_equal_prompts_without_ids_share_nothing():
    requests = [Request("a", 0, 64, 1), Request("b", 0, 64, 1)]
    assert hits([ReplaySequence(request, i) for i, request in enumerate(requests)], 16) == [0, 0]


def test_ids_of_equal_blocks_share_all_but_the_last_token():
    requests = [Request(name, 0, 64, 1, (7, 8, 9, 10), 16) for name in "ab"]
    assert hits([ReplaySequence(request, i) for i, request in enumerate(requests)], 16) == [0, 3]


def test_a_token_costs_a_byte():
    seq = ReplaySequence(Request("a", 0, 100_000, 5), 0)
    assert seq.num_tokens == seq.num_prompt_tokens == 100_000
    assert memoryview(seq.token_ids).nbytes == 100_000  # type: ignore[arg-type]
    seq.token_ids.append(0)
    assert (seq.num_output_tokens, seq.num_tokens_to_finish) == (1, 100_004)
