"""`torch.save` without the tensor bytes: its pickle, its zip, and whether plain `torch.load` takes them back.

    Pickling.save   the whole zip, with holes         load_structure   reads it back, tensors on `meta`
    Pickling.head   data.pkl alone: a save's share    blame            which value is it that torch refuses?

Each storage is replaced by a `meta` stand-in of the size that is used; torch then asks for none of its bytes.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import IO, Any, cast

import torch
from torch._tensor import _rebuild_from_type_v2
from torch._utils import (
    _rebuild_parameter,
    _rebuild_parameter_with_state,
    _rebuild_tensor_v2,
    _rebuild_tensor_v3,
)

from holdfast.errors import StateError
from trainer_side.image import SparseFile
from trainer_side.state import children
from trainer_side.survey import Survey

__all__ = ["REFUSED", "Pickling", "blame", "load_structure"]

# What saving or loading a value that torch does not take may raise, from pickle, torch, or the value's own code.
REFUSED = (
    pickle.PickleError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    NotImplementedError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


_BUILTINS = re.compile(rb"c(?:__builtin__|builtins)\n\w+")


class _HeadOnly(Exception):
    """Not an error: ends torch.save after the pickle."""


class Pickling:
    """One pickling of a tree, or of a part of it.

    Args:
        found: The survey of the tree.

    Attributes:
        kinds: Classes of the values met, other than tensors and what every pickle may hold. Whether torch.load takes a
            pickle back depends on them alone.
    """

    def __init__(self, found: Survey) -> None:
        self.kinds: set[Any] = set()
        self._found = found
        self._path = "the state"
        self._stand_ins: dict[int, tuple[torch.UntypedStorage, torch.dtype, str]] = {}

    def save(self, value: Any, file: SparseFile, finish: Callable[[bytes], bytes]) -> None:
        """Write the zip of `value`; `finish` gives the bytes of data.pkl from the pickle."""
        module = SimpleNamespace(Pickler=_pickler(self, finish), __name__="pickle")
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(value, cast(IO[bytes], file), pickle_module=module)

    def head(self, value: Any) -> bytes:
        """The pickle of `value` alone."""
        taken: list[bytes] = []

        def stop(pickled: bytes) -> bytes:
            taken.append(pickled)
            raise _HeadOnly

        with contextlib.suppress(_HeadOnly):
            self.save(value, SparseFile(), stop)
        return taken[0]

    def reduce(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """How pickle is to write `tensor`: as torch would, on the stand-in of its storage."""
        self._path = self._found.paths.get(id(tensor), self._path)
        function, arguments = tensor.__reduce_ex__(2)[:2]  # type: ignore[no-untyped-call]
        if function in (_rebuild_parameter, _rebuild_parameter_with_state):
            return function, arguments  # holds the plain tensor, which comes next
        if function is _rebuild_from_type_v2:  # a tensor with attributes
            inner, kind, inner_arguments, attributes = arguments
            return function, (inner, kind, self._on_stand_in(tensor, inner, inner_arguments), attributes)
        return function, self._on_stand_in(tensor, function, arguments)

    def _on_stand_in(
        self, tensor: torch.Tensor, function: Any, arguments: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        number = self._found.number(tensor)
        if number is None or function not in (_rebuild_tensor_v2, _rebuild_tensor_v3):
            raise StateError(
                f"near {self._path}: a tensor of {list(tensor.shape)} is kept in something other than a dict, list or "
                "tuple; only in those can holdfast find it"
            )
        # Dtypes without a storage class of their own are pickled on bytes.
        dtype = tensor.dtype if function is _rebuild_tensor_v2 else torch.uint8
        part = self._found.parts[number]
        stand_in, known_dtype, known_path = self._stand_ins.setdefault(
            number, (_stand_in(part.nbytes), dtype, self._path)
        )
        if dtype != known_dtype:
            raise StateError(
                f"{known_path} and {self._path} view the same memory as {known_dtype} and {tensor.dtype}, "
                "which a torch file cannot hold; save one of them, or a clone"
            )
        typed = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=stand_in, dtype=dtype, _internal=True
        )
        # Where torch.load is to put it: a file from a GPU job loads on any machine.
        typed._fake_device = torch.device("cpu")
        offset = tensor.storage_offset() - part.start_bytes // tensor.itemsize if tensor.numel() else 0
        return (typed, offset, *arguments[2:])


def _stand_in(nbytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]


def _pickler(job: Pickling, finish: Callable[[bytes], bytes]) -> type[pickle.Pickler]:
    """The class that torch.save derives its pickler from."""

    class Pickler(pickle.Pickler):
        def __init__(self, file: io.BytesIO, protocol: int | None = None) -> None:
            super().__init__(file, protocol)
            self._out = file

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return job.reduce(value)
            named = isinstance(value, type | FunctionType | BuiltinFunctionType)
            job.kinds.add(value if named else type(value))
            return NotImplemented

        def dump(self, value: Any) -> None:
            super().dump(value)
            pickled = self._out.getvalue()
            # Python pickles its own plain classes without asking; but weights_only refuses frozenset(), and b"".
            job.kinds.update(_BUILTINS.findall(pickled))
            finished = finish(pickled)
            self._out.seek(0)
            self._out.truncate()
            self._out.write(finished)

    return Pickler


def load_structure(file: SparseFile) -> Any:
    """Load the zip as plain `torch.load` would, without tensor bytes; raises one of `REFUSED`."""
    file.seek(0)
    return torch.load(cast(IO[bytes], file), weights_only=True, map_location="meta")


def blame(tree: Any, found: Survey, error: BaseException) -> StateError:
    """The error to raise for `error`: names the smallest part of `tree` that torch does not take, and what to do."""
    path, node, reason = "", tree, error
    seen: set[int] = set()
    while id(node) not in seen:
        seen.add(id(node))
        for key, value in children(node):
            refused = _refused(value, found)
            if refused is None and isinstance(node, dict):
                refused = _refused(key, found)
                if refused is not None:
                    path, node, reason = f"a key of {path or 'the state'}, {key!r},", key, refused
                    break
            elif refused is not None:
                path, node, reason = f"{path}/{key}" if path else str(key), value, refused
                break
    kind = f"{type(node).__module__}.{type(node).__qualname__}".removeprefix("builtins.")
    cause = str(reason).rsplit("WeightsUnpickler error:", 1)[-1].strip().split("\n", 1)[0]
    cause = cause.split(" was not an allowed", 1)[0][:200]
    advice = "torch.as_tensor(...)" if kind.startswith("numpy.") else "a tensor, number, string, list or dict"
    return StateError(
        f"{path or 'the state'} is {kind}, which plain torch.load(weights_only=True) cannot read back ({cause}); "
        f"convert it to {advice}, or leave it out of the state"
    )


def _refused(value: Any, found: Survey) -> BaseException | None:
    file = SparseFile()
    try:
        Pickling(found).save(value, file, bytes)
        load_structure(file)
    except REFUSED as error:
        return error
    return None
