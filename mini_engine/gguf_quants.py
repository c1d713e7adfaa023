"""Block quantisation of GGUF files, undone: bytes in, float32 out.

A row is cut into blocks of 32 elements, each with one float16 scale `d` (and in the *_1 types a minimum `m`):

    Q8_0  d | 32 int8                     d * q
    Q4_0  d | 16 bytes                    d * (q - 8)     low nibbles are elements 0..15, high ones 16..31
    Q4_1  d | m | 16 bytes                d * q + m
    Q5_0  d | 4 bytes | 16 bytes          d * (q - 16)    the 4 bytes hold the fifth bit of each element
    Q5_1  d | m | 4 bytes | 16 bytes      d * q + m

Source: ggml's block_q* structures. Products are rounded before the minimum is added, as ggml's reference does, so
that the result is the same to the last bit.
"""

from __future__ import annotations

import torch

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK = 32


def dequantize(raw: torch.Tensor, type_name: str) -> torch.Tensor:
    """raw: uint8 [rows, bytes of a row], any of gguf.TENSOR_TYPES. Returns [rows, columns]: float32, or the view of
    the bytes as the 16-bit float they are."""
    if type_name in _FLOATS:
        return raw.view(_FLOATS[type_name])
    rows = raw.shape[0]
    match type_name:
        case "Q8_0":
            blocks = raw.view(-1, 2 + BLOCK)
            out = blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(_half(blocks, 0))
        case "Q4_0":
            blocks = raw.view(-1, 2 + BLOCK // 2)
            out = _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0))
        case "Q4_1":
            blocks = raw.view(-1, 4 + BLOCK // 2)
            out = _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))
        case "Q5_0":
            blocks = raw.view(-1, 6 + BLOCK // 2)
            out = _nibbles(blocks[:, 6:]).add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_half(blocks, 0))
        case "Q5_1":
            blocks = raw.view(-1, 8 + BLOCK // 2)
            out = _nibbles(blocks[:, 8:]).add_(_fifth_bits(blocks[:, 4:8]))
            out = out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))
        case _:
            raise ValueError(f"no dequantisation for {type_name}")
    return out.view(rows, -1)


def int4_groups(raw: torch.Tensor, type_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parts of Q4_0 or Q4_1 without multiplying them out: (q uint8 [rows, columns], scale and minimum float32
    [rows, columns / 32]), each element being scale * q + minimum. raw: uint8 [rows, bytes of a row]."""
    rows = raw.shape[0]
    blocks = raw.view(-1, (4 if type_name == "Q4_1" else 2) + BLOCK // 2)
    packed = blocks[:, -BLOCK // 2 :]
    scale = _half(blocks, 0)
    minimum = _half(blocks, 2) if type_name == "Q4_1" else -8 * scale
    return torch.cat((packed & 15, packed >> 4), 1).view(rows, -1), scale.view(rows, -1), minimum.view(rows, -1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 16] to float32 [blocks, 32]: all low nibbles, then all high ones."""
    out = torch.empty(packed.shape[0], BLOCK)
    out[:, : BLOCK // 2] = packed & 15
    out[:, BLOCK // 2 :] = packed >> 4
    return out


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 4] to float32 [blocks, 32]: 16 where the element's bit is set, least significant bit first."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(1).to(torch.float32).mul_(16)
