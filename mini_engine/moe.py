"""A layer's MLP, and a mixture of experts in its place: a router sends each token to a few of many small MLPs.

    x [T, hidden]    -> scores = softmax(x @ router)     [T, experts], float32
                     -> the k best of each token         weights, experts [T, k]
    result           = sum over its experts of weight · expert(x)  +  shared experts(x)

Routed plainly: one pass a used expert over the tokens that chose it. On a rank of a tensor-parallel group each expert
is narrower; the router is whole, so that all ranks choose alike, and their results are added up once a layer.

Source: DeepSeekMoE (Dai et al. 2024); DeepSeek-V2 (2.2) for the groups of experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mini_engine.linear import Linear
from mini_engine.model_config import MoEShape
from mini_engine.ops import Ops
from mini_engine.weight_loader import WeightLoader


class MLP:
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, gate_up: Linear, down: Linear):
        self.gate_up, self.down = gate_up, down

    @classmethod
    def load(cls, load: WeightLoader, prefix: str) -> MLP:
        gate_up = load.linear(prefix + "gate_proj.weight", prefix + "up_proj.weight")
        return cls(gate_up, load.linear(prefix + "down_proj.weight"))

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        return self.down(ops.swiglu(self.gate_up(x)))

    def tensors(self) -> list[torch.Tensor]:
        return self.gate_up.tensors() + self.down.tensors()

    def read_bytes(self) -> int:
        """Bytes of weights that one token reads."""
        return self.gate_up.read_bytes() + self.down.read_bytes()


class MoE:
    """router [experts, hidden] float32, the published models being trained to choose in it."""

    def __init__(self, shape: MoEShape, router: torch.Tensor, experts: list[MLP], shared: MLP | None):
        self.shape, self.router, self.experts, self.shared = shape, router, experts, shared

    @classmethod
    def load(cls, load: WeightLoader, shape: MoEShape, prefix: str) -> MoE:
        router = load(prefix + "gate.weight", dtype=torch.float32)
        experts = [MLP.load(load, f"{prefix}experts.{i}.") for i in range(shape.n_routed_experts)]
        shared = MLP.load(load, prefix + "shared_experts.") if shape.n_shared_experts else None
        return cls(shape, router, experts, shared)

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        weights, experts = route(x, self.router, self.shape)
        routed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        # Sorted by expert, so that the tokens of one are a run; stable, so that a token's batch-mates change nothing.
        order = experts.flatten().argsort(stable=True)
        tokens, weight = order // experts.shape[1], weights.flatten()[order, None]
        first = 0
        for expert, count in enumerate(experts.flatten().bincount(minlength=len(self.experts)).tolist()):
            if count:
                run = slice(first, first + count)
                routed.index_add_(0, tokens[run], self.experts[expert](x[tokens[run]], ops) * weight[run])
                first += count
        result = routed.to(x.dtype)
        return result if self.shared is None else result + self.shared(x, ops)

    def tensors(self) -> list[torch.Tensor]:
        shared = [self.shared] if self.shared else []
        return [self.router, *(tensor for mlp in self.experts + shared for tensor in mlp.tensors())]

    def read_bytes(self) -> int:
        """Bytes of weights that one token reads: the router, its own experts, the shared ones."""
        shared = self.shared.read_bytes() if self.shared else 0
        return self.router.nbytes + self.shape.num_experts_per_tok * self.experts[0].read_bytes() + shared


def route(x: torch.Tensor, router: torch.Tensor, shape: MoEShape) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights, [T, num_experts_per_tok] each: float32 and int64, in no order.

    group_limited_greedy: a group of experts counts as much as its best one, and experts outside the topk_group best
    groups score 0.
    """
    scores = F.linear(x.float(), router).softmax(dim=-1)
    if shape.topk_method == "group_limited_greedy":
        grouped = scores.view(len(x), shape.n_group, -1)
        best = grouped.amax(dim=-1).topk(shape.topk_group, dim=-1, sorted=False).indices
        usable = torch.zeros(len(x), shape.n_group, 1, dtype=torch.bool, device=x.device)
        scores = grouped.masked_fill(~usable.scatter_(1, best[..., None], True), 0.0).flatten(1)
    weights, experts = scores.topk(shape.num_experts_per_tok, dim=-1, sorted=False)
    # Either the one or the other, as in DeepSeek's own code. transformers never norms; published V2 models ask for no
    # norming, so that the two agree on them.
    if shape.norm_topk_prob and shape.num_experts_per_tok > 1:
        return weights / weights.sum(dim=-1, keepdim=True), experts
    return weights * shape.routed_scaling_factor, experts
