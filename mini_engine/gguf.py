"""The GGUF container: a header of typed metadata and tensor descriptions, then the tensors, read through a memory map.

    magic "GGUF" | version | number of tensors | number of metadata entries
    entries:  key, type, value
    tensors:  name, dimensions (innermost first), type, offset
    padding to `general.alignment`, then the data, each tensor at its offset

Nothing is trusted: every count is compared with the bytes that are left before anything is allocated or looped over.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mini_engine.errors import ModelLoadError

# type: (name, elements in a block, bytes of a block). Types that are named but have no size cannot be read here.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
BLOCKS = {name: (elements, nbytes) for name, elements, nbytes in TENSOR_TYPES.values()}
UNSUPPORTED_TYPES = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SMALLEST_ENTRY = 8 + 1 + 4 + 1  # key length, a character, type, value
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # name length, a character, number of dimensions, one of them, type, offset


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. shape: outermost dimension first, as torch has it; start, nbytes: in the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    nbytes: int


class GGUFFile:
    """A memory-mapped GGUF file: `metadata` (plain Python values) and `tensors` by name, as the file calls them.

    Raises ModelLoadError, in one line that names the file, for anything that does not agree with itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelLoadError(f"{path}: the file is empty") from None
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            header = _Header(self._map, path)
            self.metadata, self.tensors = header.metadata, header.tensors
        except ModelLoadError:
            self.close()
            raise

    def raw(self, info: TensorInfo) -> np.ndarray:
        """The tensor's bytes as they are, uint8 [rows, bytes of a row]: a read-only view into the map, to be let go
        of before `close`."""
        data = np.frombuffer(self._map, np.uint8, count=info.nbytes, offset=info.start)
        return data.reshape(math.prod(info.shape[:-1]), -1)

    def release(self, info: TensorInfo) -> None:
        """Tell the system that the tensor's pages are not needed any more, so that they do not count as our memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = info.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, info.start + info.nbytes - start)

    def close(self) -> None:
        # After an interrupted read a traceback may hold a view: the map then goes when the last view does.
        with contextlib.suppress(BufferError):
            self._map.close()


class _Header:
    """A cursor over the header. `metadata` and `tensors` are complete when it has been constructed."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.size, self.at = data, path, len(data), 0
        self._check_version()
        num_tensors, num_entries = self._unpack("<QQ")
        self._check_count(num_entries, _SMALLEST_ENTRY, "metadata entries")
        self._check_count(num_tensors, _SMALLEST_TENSOR, "tensors")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            if key in self.metadata:
                raise self._error(f"the metadata key {key!r} occurs twice")
            self.metadata[key] = self._value(*self._unpack("<I"))
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._error(f"general.alignment is {alignment!r}, not a positive number")
        data_start = -(-self.at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in described:
            if name in self.tensors:
                raise self._error(f"the tensor {name!r} occurs twice")
            self.tensors[name] = self._place(name, shape, type_id, data_start, offset, alignment)

    def _error(self, cause: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {cause}")

    def _check_version(self) -> None:
        if self.data[:4] != b"GGUF":
            raise self._error(f"not a GGUF file: it begins with {self.data[:4]!r}, not b'GGUF'")
        self.at = 4
        (version,) = self._unpack("<I")
        if version not in (2, 3):
            kind = "a big-endian file" if version & 0xFFFF == 0 else f"GGUF version {version}"
            raise self._error(f"{kind} is not supported, only little-endian versions 2 and 3")

    def _check_count(self, count: int, smallest: int, what: str) -> None:
        left = self.size - self.at
        if count * smallest > left:
            raise self._error(
                f"truncated or corrupt: {count} {what} need at least {count * smallest} bytes, {left} are left"
            )

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        end = self.at + struct.calcsize(layout)
        if end > self.size:
            raise self._error(f"truncated: the header goes on past the end of the file at byte {self.size}")
        values = struct.unpack_from(layout, self.data, self.at)
        self.at = end
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        start, self.at = self.at, self.at + length
        if self.at > self.size:
            raise self._error(f"truncated or corrupt: a string of {length} bytes at byte {start} of {self.size}")
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise self._error(f"corrupt: the string at byte {start} is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._unpack("<" + _SCALARS[kind])[0]
        if kind != _ARRAY:
            raise self._error(f"corrupt: unknown metadata type {kind} at byte {self.at}")
        element, count = self._unpack("<IQ")
        if element == _STRING:
            self._check_count(count, 8, "strings")
            return [self._string() for _ in range(count)]
        if element not in _SCALARS:
            raise self._error(f"an array of metadata type {element} at byte {self.at} is not supported")
        self._check_count(count, struct.calcsize("<" + _SCALARS[element]), "array elements")
        return list(self._unpack(f"<{count}{_SCALARS[element]}"))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dims,) = self._unpack("<I")
        if not 1 <= dims <= 4:
            raise self._error(f"corrupt: the tensor {name!r} has {dims} dimensions, expected 1 to 4")
        shape = self._unpack(f"<{dims}Q")[::-1]  # the file lists the innermost dimension first
        type_id, offset = self._unpack("<IQ")
        return name, shape, type_id, offset

    def _place(
        self, name: str, shape: tuple[int, ...], type_id: int, data_start: int, offset: int, alignment: int
    ) -> TensorInfo:
        if type_id not in TENSOR_TYPES:
            type_name = UNSUPPORTED_TYPES.get(type_id, f"number {type_id}")
            readable = ", ".join(known for known, _, _ in TENSOR_TYPES.values())
            raise self._error(
                f"the tensor {name!r} has type {type_name}, which cannot be read; {readable} can: take such a file of "
                f"the model, or its safetensors"
            )
        type_name, block, block_bytes = TENSOR_TYPES[type_id]
        if 0 in shape or shape[-1] % block:
            raise self._error(f"corrupt: the tensor {name!r} of type {type_name} has shape {shape}")
        nbytes = math.prod(shape) // block * block_bytes
        start = data_start + offset
        if offset % alignment:
            raise self._error(f"corrupt: the tensor {name!r} lies at offset {offset}, no multiple of {alignment}")
        if start + nbytes > self.size:
            raise self._error(
                f"truncated: the tensor {name!r} lies at bytes {start} to {start + nbytes}, the file has {self.size}"
            )
        return TensorInfo(name, shape, type_name, start, nbytes)
