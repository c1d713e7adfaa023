"""What a decoder layer does besides its matrix products, on one of three backends.

attention_backend   "torch"    anywhere; the reference
                    "triton"   our Triton kernels: an NVIDIA GPU; on a CPU only in Triton's interpreter, for tests
                    "numba"    our CPU kernels
                    "auto"     triton on a GPU, numba on a CPU, torch where the package for that is not installed
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from mini_engine.attention import AttentionState, TorchAttention
from mini_engine.batch import Batch
from mini_engine.block_pool import BlockCopy
from mini_engine.context_shard import ContextShard
from mini_engine.dcp import context_attention, merge_parts
from mini_engine.errors import ConfigError
from mini_engine.kv_cache import KVCache

Attention = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, q [T, heads, Dq]) -> out [T, heads, Dv]"""
StateAttention = Callable[[int, torch.Tensor], AttentionState]
"""The same with the lse, for what is to be merged."""


class Contexts(NamedTuple):
    """What new tokens attend to that lies here of their sequences' contexts, all of it seen by all of them.

    block_table [S, longest]; query_lens: new tokens of each sequence; lens: tokens here, perhaps none.
    """

    block_table: torch.Tensor
    query_lens: tuple[int, ...]
    lens: tuple[int, ...]


class Ops(Protocol):
    """`qk` is [T, heads + kv_heads, D], the query and key heads of the QKV product; it may be changed in place."""

    replayable: bool
    """Whether a step's launches depend on the shapes of its batch alone, so that a CUDA graph can replay them."""

    def attention(self, batch: Batch, kv: KVCache, scale: float, dtype: torch.dtype) -> Attention:
        """Causal attention over all of a batch's tokens in `kv`, the new ones among them. Made once a step, called once
        a layer. dtype: what the model computes in."""
        ...

    def context_attention(self, contexts: Contexts, kv: KVCache, scale: float) -> StateAttention:
        """Attention of a step's new tokens over contexts alone. Float32; a token that sees nothing is (0, -inf)."""
        ...

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> AttentionState:
        """The state over the keys of all parts. outs [N, T, heads, D], lses [N, T, heads]."""
        ...

    def copy_blocks(self, kv: KVCache, copies: Seq[BlockCopy]) -> None: ...

    def write(self, kv: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None: ...

    def rotary(self, cos_sin: torch.Tensor, positions: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Made once a step: rotates the qk of any layer."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def qk_norm(
        self, qk: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: int, eps: float
    ) -> torch.Tensor:
        """Qwen3's norm of each head; the first `heads` are query heads."""
        ...

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor: ...


class TorchOps:
    """Plain torch."""

    replayable = False

    def attention(self, batch: Batch, kv: KVCache, scale: float, dtype: torch.dtype) -> Attention:
        attention = TorchAttention(batch, kv.block_size, scale)
        return lambda layer, q: attention(q, *kv.layers[layer]).out

    def context_attention(self, contexts: Contexts, kv: KVCache, scale: float) -> StateAttention:
        table, query_lens, lens = contexts
        return lambda layer, q: context_attention(q, *kv.layers[layer], table, query_lens, lens, ContextShard(), scale)

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> AttentionState:
        return merge_parts(outs, lses)

    def copy_blocks(self, kv: KVCache, copies: Seq[BlockCopy]) -> None:
        kv.copy_blocks(copies)

    def write(self, kv: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        kv.write(layer, k, v, slot_mapping)

    def rotary(self, cos_sin: torch.Tensor, positions: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        cos, sin = cos_sin[positions].unsqueeze(1).unbind(2)
        return lambda qk: rotate(qk, cos, sin)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def qk_norm(
        self, qk: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: int, eps: float
    ) -> torch.Tensor:
        return torch.cat((rms_norm(qk[:, :heads], q_weight, eps), rms_norm(qk[:, heads:], k_weight, eps)), dim=1)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def make_ops(attention_backend: str, device: torch.device) -> Ops:
    """Raises ConfigError where the backend asked for cannot run. Only here are triton and numba imported."""
    backend = resolve_backend(attention_backend, device)
    if backend == "torch":
        return TorchOps()
    if not _is_here(backend):
        raise ConfigError(
            f"attention_backend '{backend}' needs the {backend} package: install it, or use 'torch' or 'auto'"
        )
    return _numba_ops(device) if backend == "numba" else _triton_ops(device)


def _numba_ops(device: torch.device) -> Ops:
    from mini_engine.numba_ops import NumbaOps

    if device.type != "cpu":
        raise ConfigError(
            f"attention_backend 'numba' is for a CPU, this engine runs on {device.type}; use 'triton' or 'auto'"
        )
    return NumbaOps()


def _triton_ops(device: torch.device) -> Ops:
    import triton

    from mini_engine.triton_ops import TritonOps

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ConfigError(
            f"attention_backend 'triton' needs a CUDA device, this engine runs on {device.type}; use 'numba' or 'auto' "
            f"(TRITON_INTERPRET=1 runs the kernels in Triton's slow interpreter, for tests)"
        )
    return TritonOps()


def resolve_backend(attention_backend: str, device: torch.device) -> str:
    """'auto' is the kernels made for the device where their package is installed, torch elsewhere."""
    if attention_backend != "auto":
        return attention_backend
    backend = "triton" if device.type == "cuda" else "numba"
    return backend if _is_here(backend) else "torch"


def _is_here(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, the mean in float32; as few operators as it takes."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).to(x.dtype).mul_(weight)


@cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """A number as a tensor: given as a number, each operator would convert it anew."""
    with torch.inference_mode(False):
        return torch.tensor(value, device=device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, heads, D]; cos and sin [T, 1, D], the sine's first half negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
