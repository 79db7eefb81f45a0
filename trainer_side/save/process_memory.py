"""Views of all memory of this process: one loop in C reads words or CRCs of thousands of tensors that are kept."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

WORD_BYTES = 8
PROCESS_BEGIN = 64
"""The address of the first byte; not zero, because numpy takes zero for a null pointer."""
_everything = memoryview((ctypes.c_uint8 * (1 << 56)).from_address(PROCESS_BEGIN))
PROCESS_MEMORY = _everything.cast("B")
"""Byte n lies at address `PROCESS_BEGIN` + n."""
PROCESS_BYTES: npt.NDArray[np.uint8] = np.frombuffer(_everything, np.uint8)
AT_EACH_BYTE: npt.NDArray[Any] = np.lib.stride_tricks.as_strided(
    np.frombuffer(_everything, np.dtype((np.void, WORD_BYTES)), count=1),
    shape=(PROCESS_BYTES.size - WORD_BYTES,),
    strides=(1,),
    writeable=False,
)
"""The word of eight bytes that begins at each byte."""
