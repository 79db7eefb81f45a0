"""The pickler of states: `torch.load(weights_only=True)` takes what it writes of plain values that it would refuse."""

from __future__ import annotations

import io
import pickle
from typing import Any

from trainer_side.state.empty_bytes import with_readable_empty_bytes
from trainer_side.state.numpy_scalars import MetNumpyScalar, is_scalar, with_python_scalars


class ReadablePickler(pickle.Pickler):
    """As `pickle.Pickler`, for `torch.save(..., pickle_module=...)`."""

    def __init__(self, file: io.BytesIO, protocol: int | None = None) -> None:
        super().__init__(file, protocol)
        self._out = file
        self._meets_scalars = True

    def reducer_override(self, value: Any) -> Any:
        if self._meets_scalars and is_scalar(value):
            raise MetNumpyScalar
        return NotImplemented

    def dump(self, value: Any) -> None:
        try:
            super().dump(value)
        except MetNumpyScalar:
            # One that is still met lies where the tree cannot be changed, and is left for torch to refuse.
            self._meets_scalars = False
            self.clear_memo()
            self._empty()
            super().dump(with_python_scalars(value))
        finished = self.finished(with_readable_empty_bytes(self._out.getvalue()))
        self._empty()
        self._out.write(finished)

    def finished(self, pickled: bytes) -> bytes:
        """What is written in place of `pickled`."""
        return pickled

    def _empty(self) -> None:
        self._out.seek(0)
        self._out.truncate()
