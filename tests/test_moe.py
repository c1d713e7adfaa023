"""Routing and experts, against transformers and against loops over single tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.errors import ModelLoadError
from mini_engine.linear import Linear
from mini_engine.model_config import MoEShape
from mini_engine.moe import MLP, MoE, route
from mini_engine.ops import TorchOps

OPS = TorchOps()
HIDDEN = 32
GREEDY = MoEShape(8, 3, 20, n_shared_experts=2, routed_scaling_factor=1.7)
LIMITED = dataclasses.replace(GREEDY, topk_method="group_limited_greedy", n_group=4, topk_group=2)


def rand(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def transformers_moe(shape: MoEShape, seed: int) -> Any:
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    settings = {**dataclasses.asdict(shape), "hidden_size": HIDDEN, "num_attention_heads": 4}
    peer = DeepseekV2Moe(DeepseekV2Config(**settings)).requires_grad_(False)
    for number, weight in enumerate(peer.parameters()):
        weight.copy_(0.3 * rand(*weight.shape, seed=100 * seed + number))
    return peer


def twin_of(peer: Any, shape: MoEShape) -> MoE:
    def mlp(gate_up: torch.Tensor, down: torch.Tensor) -> MLP:
        return MLP(Linear(gate_up), Linear(down))

    shared = peer.shared_experts
    shared_gate_up = torch.cat((shared.gate_proj.weight, shared.up_proj.weight))
    experts = [mlp(*weights) for weights in zip(peer.experts.gate_up_proj, peer.experts.down_proj, strict=True)]
    return MoE(shape, peer.gate.weight, experts, mlp(shared_gate_up, shared.down_proj.weight))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [GREEDY, LIMITED], ids=["greedy", "group-limited"])
def test_equals_transformers(shape: MoEShape, seed: int) -> None:
    peer = transformers_moe(shape, seed)
    x = rand(13, HIDDEN)
    torch.testing.assert_close(twin_of(peer, shape)(x, OPS), peer(x[None])[0], rtol=1e-5, atol=1e-5)


def test_the_two_ways_to_pick_differ_here() -> None:
    """Else the test above could not tell them apart."""
    x, router = rand(50, HIDDEN), torch.eye(8, HIDDEN)
    picked = [route(x, router, shape)[1].sort(dim=-1).values for shape in (GREEDY, LIMITED)]
    assert not torch.equal(*picked)


@given(
    seed=st.integers(0, 10_000),
    num_groups=st.sampled_from([1, 2, 4]),
    group_size=st.integers(1, 4),
    norm=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_routing_token_by_token(seed: int, num_groups: int, group_size: int, norm: bool, data: Any) -> None:
    """The rule in plain loops: rank groups by their best expert, rank the experts of the best groups."""
    used = data.draw(st.integers(1, num_groups))
    chosen = data.draw(st.integers(1, used * group_size))
    shape = MoEShape(
        num_groups * group_size, chosen, 4, topk_method="group_limited_greedy", n_group=num_groups, topk_group=used,
        norm_topk_prob=norm, routed_scaling_factor=2.5,
    )  # fmt: skip
    num_experts = num_groups * group_size
    x, router = rand(4, 8, seed=seed), rand(num_experts, 8, seed=seed + 1)
    weights, experts = route(x, router, shape)
    for token in range(4):
        scores = (x[token] @ router.T).softmax(0).tolist()
        groups = [range(first, first + group_size) for first in range(0, num_experts, group_size)]
        groups.sort(key=lambda group: -max(scores[expert] for expert in group))
        eligible = sorted((expert for group in groups[:used] for expert in group), key=lambda e: -scores[e])
        expected = {expert: scores[expert] for expert in eligible[:chosen]}
        factor = 1 / sum(expected.values()) if norm and chosen > 1 else 2.5
        found = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
        assert found == pytest.approx({expert: score * factor for expert, score in expected.items()}, rel=1e-4)


def test_norming_takes_the_place_of_scaling() -> None:
    x, router = rand(5, HIDDEN), rand(8, HIDDEN, seed=8)
    normed = route(x, router, dataclasses.replace(GREEDY, norm_topk_prob=True))[0]
    torch.testing.assert_close(normed.sum(-1), torch.ones(5))
    one = dataclasses.replace(GREEDY, num_experts_per_tok=1)  # a single score is not made 1: the router would be lost
    assert torch.equal(route(x, router, dataclasses.replace(one, norm_topk_prob=True))[0], route(x, router, one)[0])


def test_scores_are_float32_whatever_the_model_computes_in() -> None:
    weights, _ = route(rand(3, HIDDEN).bfloat16(), rand(8, HIDDEN, seed=8), GREEDY)
    assert weights.dtype == torch.float32


def test_experts_nobody_chose_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = twin_of(transformers_moe(GREEDY, 0), GREEDY)
    x = rand(2, HIDDEN)
    chosen = set(route(x, moe.router, GREEDY)[1].flatten().tolist())
    assert 3 <= len(chosen) < 8
    ran: list[int] = []

    def counted(number: int, real: Linear) -> Any:
        def product(rows: torch.Tensor) -> torch.Tensor:
            ran.append(number)
            return real(rows)

        return product

    for number, expert in enumerate(moe.experts):
        monkeypatch.setattr(expert, "gate_up", counted(number, expert.gate_up))
    moe(x, OPS)
    assert sorted(ran) == sorted(chosen)


def test_a_token_does_not_depend_on_its_batch_mates() -> None:
    moe = twin_of(transformers_moe(LIMITED, 1), LIMITED)
    x = rand(9, HIDDEN)
    alone = torch.cat([moe(row[None], OPS) for row in x])
    torch.testing.assert_close(moe(x, OPS), alone, rtol=1e-4, atol=1e-5)


def test_parts_of_two_ranks_add_up_to_the_whole() -> None:
    """Each expert cut by its inner width, as a tensor-parallel rank holds it."""
    whole = twin_of(transformers_moe(GREEDY, 2), GREEDY)
    x = rand(6, HIDDEN)

    def half(mlp: MLP, rank: int) -> MLP:
        gate, up = mlp.gate_up.weight.chunk(2)
        parts = torch.cat((gate.chunk(2)[rank], up.chunk(2)[rank]))
        return MLP(Linear(parts), Linear(mlp.down.weight.chunk(2, dim=1)[rank].contiguous()))

    assert whole.shared is not None
    ranks = [
        MoE(GREEDY, whole.router, [half(expert, rank) for expert in whole.experts], half(whole.shared, rank))
        for rank in (0, 1)
    ]
    torch.testing.assert_close(ranks[0](x, OPS) + ranks[1](x, OPS), whole(x, OPS), rtol=1e-5, atol=1e-5)


def test_without_shared_experts() -> None:
    peer = transformers_moe(GREEDY, 0)
    moe = twin_of(peer, GREEDY)
    x = rand(4, HIDDEN)
    moe.shared = None
    torch.testing.assert_close(moe(x, OPS), (peer(x[None]) - peer.shared_experts(x[None]))[0], rtol=1e-4, atol=1e-5)


def test_bytes_that_one_token_reads() -> None:
    moe = twin_of(transformers_moe(GREEDY, 0), GREEDY)
    router, expert, shared = 8 * HIDDEN, 3 * HIDDEN * 20, 3 * HIDDEN * 2 * 20
    assert moe.read_bytes() == 4 * (router + 3 * expert + shared) == 4 * GREEDY.num_params_read(HIDDEN)
    assert sum(x.nbytes for x in moe.tensors()) == 4 * (router + 8 * expert + shared) == 4 * GREEDY.num_params(HIDDEN)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"n_routed_experts": 0}, "n_routed_experts must be a positive integer, got 0"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok must be a positive integer, got True"),
        ({"moe_intermediate_size": 1.5}, "moe_intermediate_size must be a positive integer, got 1.5"),
        ({"n_shared_experts": -1}, "n_shared_experts must be a whole number, got -1"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace must be a whole number, got None"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported, only greedy and group_limited_greedy"),
        ({"n_group": 3, "topk_method": "group_limited_greedy"}, "8 experts in n_group 3 groups"),
        ({"n_group": 2, "topk_group": 3, "topk_method": "group_limited_greedy"}, "topk_group 3 .*at least as many"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({"n_group": 4, "topk_group": 1, "topk_method": "group_limited_greedy"}, "tok 3 is more than the 2 experts"),
    ],
    ids=str,
)
def test_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says) as caught:
        dataclasses.replace(GREEDY, **changes)
    assert "\n" not in str(caught.value)
