"""The four architectures the kernels are compiled for, and what one of their SMs can hold at a time.

Sources: limits per SM from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; SMs,
bandwidth and dense bf16 throughput with float32 sums from NVIDIA's data sheets and architecture papers of the named
cards; clock = that throughput / (SMs * the tensor cores' operations a cycle), so that the figures agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mini_engine.errors import ConfigError

KIB = 1024
WARP = 32
RESERVED_SHARED = KIB  # the driver's own, a block
REGISTER_UNIT = 256  # registers are handed out to a warp in these
SHARED_UNIT = 128


@dataclass(frozen=True)
class GPU:
    """One card of an architecture. Bytes, bytes/s, FLOP/s, Hz. device_name: a part of what the driver calls it."""

    arch: str
    card: str
    device_name: str
    num_sms: int
    shared_per_sm: int
    shared_per_block: int
    max_warps: int
    max_blocks: int
    bandwidth: float
    bf16_flops: float
    clock: float
    registers_per_sm: int = 65536

    @property
    def capability(self) -> int:
        return int(self.arch.removeprefix("sm_"))

    def blocks_per_sm(self, registers: int, shared_bytes: int, num_warps: int) -> int:
        """How many blocks of a kernel run on one SM at a time. registers: a thread; shared_bytes: a block."""
        per_warp = _round_up(registers * WARP, REGISTER_UNIT)
        shared = _round_up(shared_bytes + RESERVED_SHARED, SHARED_UNIT)
        by_registers = self.registers_per_sm // per_warp // num_warps
        return min(by_registers, self.shared_per_sm // shared, self.max_warps // num_warps, self.max_blocks)


GPUS = {
    gpu.arch: gpu
    for gpu in (
        GPU("sm_80", "A100 SXM 80 GB", "A100-SXM4-80GB", 108, 164 * KIB, 163 * KIB, 64, 32, 2.039e12, 312e12, 1.41e9),
        GPU("sm_90", "H100 SXM", "H100 80GB HBM3", 132, 228 * KIB, 227 * KIB, 64, 32, 3.35e12, 989e12, 1.83e9),
        GPU("sm_100", "B200", "B200", 148, 228 * KIB, 227 * KIB, 64, 32, 8.0e12, 2250e12, 1.86e9),
        GPU("sm_120", *2 * ("RTX PRO 6000 Blackwell",), 188, 100 * KIB, 99 * KIB, 48, 24, 1.792e12, 503.8e12, 2.617e9),
    )
}
# Measured on, not compiled for: the H100's SMs with faster memory.
OTHER_CARDS = (replace(GPUS["sm_90"], card="H200", device_name="H200", bandwidth=4.8e12),)
SCHEDULERS_PER_SM = 4  # each issues one instruction of one warp a cycle


def gpu(arch: str) -> GPU:
    """Raises ConfigError for an architecture that is not in the table."""
    if arch not in GPUS:
        raise ConfigError(f"arch {arch!r} is not one of {', '.join(GPUS)}")
    return GPUS[arch]


@dataclass(frozen=True)
class StaticBound:
    """Three times, in seconds, none of which a launch can beat; what it really takes lies above the largest."""

    memory: float
    tensor: float
    issue: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.tensor, self.issue)


def static_bound(gpu: GPU, num_bytes: float, flops: float, warp_instructions: float) -> StaticBound:
    """Lower bound from the least traffic, the tensor-core work, and the instructions to issue over all warps."""
    slots = SCHEDULERS_PER_SM * gpu.num_sms * gpu.clock
    return StaticBound(num_bytes / gpu.bandwidth, flops / gpu.bf16_flops, warp_instructions / slots)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
