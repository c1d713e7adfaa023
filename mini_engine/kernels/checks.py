"""What a launcher refuses, in one line each, before anything reaches the device.

Only shapes, strides and types are looked at, never values: reading one value would wait for the device, and could not
be replayed by a CUDA graph.
"""

from __future__ import annotations

import torch

from mini_engine.errors import EngineError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class KernelInputError(EngineError):
    """Tensors that a kernel was not written for."""


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Every dimension as given; None stands for any length. Raises KernelInputError."""
    fits = tensor.dim() == len(shape) and all(
        want in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise KernelInputError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")


def check_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """One of `dtypes`. Raises KernelInputError."""
    if tensor.dtype not in dtypes:
        raise KernelInputError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def check_rows(**tensors: torch.Tensor) -> None:
    """Neighbours in the last dimension lie side by side, so that a row is loaded in wide pieces."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise KernelInputError(
                f"{name} must be contiguous in its last dimension, its strides are {tensor.stride()}"
            )


def check_contiguous(**tensors: torch.Tensor) -> None:
    """Raises KernelInputError for a view with gaps."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise KernelInputError(f"{name} must be contiguous, its strides are {tensor.stride()}: call .contiguous()")


def check_same_strides(**tensors: torch.Tensor) -> None:
    """One set of strides serves all of them in the kernel. Raises KernelInputError."""
    strides = {name: tensor.stride() for name, tensor in tensors.items()}
    if len(set(strides.values())) > 1:
        raise KernelInputError(f"the strides of {' and '.join(strides)} must be equal, got {strides}")


def check_device(device: torch.device, **tensors: torch.Tensor) -> None:
    """All on one device. Raises KernelInputError."""
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise KernelInputError(f"{name} is on {tensor.device}, the other tensors are on {device}")
