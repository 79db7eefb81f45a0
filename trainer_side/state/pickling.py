"""`torch.save` without the tensor bytes: its pickle, its zip, and whether plain `torch.load` accepts them.

Each storage is replaced by a `meta` stand-in of the used size; torch then reads none of its bytes.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import re
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import IO, Any, cast

import numpy as np
import torch
from torch._tensor import _rebuild_from_type_v2
from torch._utils import (
    _rebuild_parameter,
    _rebuild_parameter_with_state,
    _rebuild_tensor_v2,
    _rebuild_tensor_v3,
)

from holdfast.errors import StateError
from trainer_side.state.pickle_bounds import unpickler_cause
from trainer_side.state.sparse_file import SparseFile
from trainer_side.state.survey import Survey
from trainer_side.state.tree import children, with_changes

_PYTHON = (bool, int, float, complex, str, bytes)


class NumpyScalarFound(pickle.PicklingError):
    """Ends a pickling: the tree must be pickled `with_python_scalars`."""


def is_scalar(value: Any) -> bool:
    """Whether this is a NumPy scalar with an equal Python value."""
    # For dates and durations, `item()` may drop the unit.
    if not isinstance(value, np.generic) or isinstance(value, np.datetime64 | np.timedelta64 | np.void):
        return False
    return type(value.item()) in _PYTHON


def with_python_scalars(tree: Any) -> Any:
    """Return the tree with Python scalars. Containers without NumPy scalars stay the same objects; sharing is kept."""
    done: dict[int, Any] = {}

    def of(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item() if is_scalar(value) else value
        if not isinstance(value, dict | list | tuple):
            return value
        if id(value) not in done:
            done[id(value)] = value  # for a container that holds itself
            done[id(value)] = _replace_scalars(value, {key: of(one) for key, one in children(value)}, of)
        return done[id(value)]

    return of(tree)


def _replace_scalars(node: Any, values: dict[Any, Any], of: Any) -> Any:
    if isinstance(node, dict) and any(isinstance(key, np.generic) for key in node):
        pairs = [(of(key), value) for key, value in values.items()]
        if type(node) is dict:
            return dict(pairs)
        other = with_changes(node, {})
        other.clear()
        for key, value in pairs:
            other[key] = value
        return other
    changed = {key: values[key] for key, value in children(node) if values[key] is not value}
    return with_changes(node, changed) if changed else node


_BYTES_TYPE = frozenset({"__builtin__ bytes", "builtins bytes"})
_MARK = b"\nbytes\n"
_ENCODE = b"c_codecs\nencode\n"
_NOTHING_AS_LATIN1 = b"X\0\0\0\0X\x06\0\0\0latin1\x86"  # two texts, and the tuple of both
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


def with_readable_empty_bytes(pickled: bytes) -> bytes:
    """Return a pickle of protocol 2 with each `b""` encoded as other bytes are. Other pickles are returned as is."""
    if _MARK not in pickled:
        return pickled
    ops: list[tuple[str, Any, int]] = [
        (op.name, argument, position or 0) for op, argument, position in pickletools.genops(pickled)
    ]
    uses: list[int] = []  # the `ops` that push the type
    memo: set[Any] = set()
    for index, (name, argument, _) in enumerate(ops):
        if name == "GLOBAL" and argument in _BYTES_TYPE:
            uses.append(index)
            if ops[index + 1][0] in _PUTS:
                memo.add(ops[index + 1][1])
        elif name in _GETS and argument in memo:
            uses.append(index)
    pieces, done = [], 0
    for index in uses:
        called = index + 2 if ops[index + 1][0] in _PUTS else index + 1
        if [name for name, _, _ in ops[called : called + 2]] != ["EMPTY_TUPLE", "REDUCE"]:
            return pickled  # the type itself is a value: torch refuses it by name
        begin, after = ops[index][2], ops[index + 1][2]
        is_global = ops[index][0] == "GLOBAL"
        pieces += [pickled[done:begin], _ENCODE if is_global else pickled[begin:after]]
        pieces += [pickled[after : ops[called][2]], _NOTHING_AS_LATIN1]
        done = ops[called + 1][2]
    return b"".join([*pieces, pickled[done:]])


class ReadablePickler(pickle.Pickler):
    """Pickler for `torch.save(..., pickle_module=...)` that writes NumPy scalars and `b""` as torch.load reads them."""

    def __init__(self, file: io.BytesIO, protocol: int | None = None) -> None:
        super().__init__(file, protocol)
        self._out = file
        self._raise_on_scalars = True

    def reducer_override(self, value: Any) -> Any:
        if self._raise_on_scalars and is_scalar(value):
            raise NumpyScalarFound
        return NotImplemented

    def dump(self, value: Any) -> None:
        try:
            super().dump(value)
        except NumpyScalarFound:
            # The remaining scalars lie inside other objects, and torch refuses them.
            self._raise_on_scalars = False
            self.clear_memo()
            self._clear_output()
            super().dump(with_python_scalars(value))
        finished = self.finalize(with_readable_empty_bytes(self._out.getvalue()))
        self._clear_output()
        self._out.write(finished)

    def finalize(self, pickled: bytes) -> bytes:
        """Return the bytes to write in place of `pickled`."""
        return pickled

    def _clear_output(self) -> None:
        self._out.seek(0)
        self._out.truncate()


# Exceptions of saving or loading a value that torch refuses, from pickle, torch, or the value's own code.
REFUSED = (
    *(pickle.PickleError, ArithmeticError, AssertionError, AttributeError, EOFError, ImportError),
    *(LookupError, NotImplementedError, RecursionError, RuntimeError, TypeError, ValueError),
)


_BUILTINS = re.compile(rb"c(?:__builtin__|builtins)\n\w+")


class _StopAfterPickle(Exception):
    """Ends torch.save after the pickle."""


class Pickling:
    """One pickling of a tree, or of a part of it."""

    def __init__(self, found: Survey) -> None:
        # Classes of the pickled values, except tensors and plain values. They alone decide whether torch.load accepts
        # the pickle.
        self.kinds: set[Any] = set()
        self._found = found
        self._path = "the state"
        self._stand_ins: dict[int, tuple[torch.UntypedStorage, torch.dtype, str]] = {}
        # By `id()`: each tensor and how it was pickled. Keeping the tensor keeps its id from being reused.
        self.reduced: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}
        self.persistent_ids: dict[int, tuple[Any, Any]] = {}  # by `id()`: each storage and its id in the file

    def save(self, value: Any, file: SparseFile, finish: Callable[[bytes], bytes]) -> None:
        """Write the zip of `value`; `finish` turns the pickle into the bytes of data.pkl."""
        jobs = [self]
        module = SimpleNamespace(Pickler=_pickler(jobs, finish), __name__="pickle")
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(value, cast(IO[bytes], file), pickle_module=module)
        finally:
            jobs.clear()  # the class lives until the next garbage collection, and would keep all tensors alive

    def pickle(self, value: Any) -> bytes:
        taken: list[bytes] = []

        def stop(pickled: bytes) -> bytes:
            taken.append(pickled)
            raise _StopAfterPickle

        with contextlib.suppress(_StopAfterPickle):
            self.save(value, SparseFile(), stop)
        return taken[0]

    def reduce(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Reduce `tensor` as torch would, but on the stand-in of its storage."""
        reduction = self._reduction(tensor)
        self.reduced[id(tensor)] = (tensor, reduction)
        return reduction

    def note_persistent_ids(self, persistent_id: Callable[[Any], Any]) -> None:
        for _, reduction in self.reduced.values():
            typed = reduction[1][0]
            if isinstance(typed, torch.storage.TypedStorage):
                self.persistent_ids[id(typed)] = (typed, persistent_id(typed))

    def _reduction(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        self._path = self._found.paths.get(id(tensor), self._path)
        function, arguments = tensor.__reduce_ex__(2)[:2]  # type: ignore[no-untyped-call]
        if function in (_rebuild_parameter, _rebuild_parameter_with_state):
            return function, arguments  # contains the plain tensor, which is reduced next
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
                f"near {self._path}: a tensor of shape {list(tensor.shape)} is inside another object than a dict, "
                "list or tuple, where holdfast cannot find it; put it into one of these"
            )
        # Dtypes without a storage class of their own are pickled on a storage of bytes.
        dtype = tensor.dtype if function is _rebuild_tensor_v2 else torch.uint8
        part = self._found.parts[number]
        if number not in self._stand_ins:
            meta = torch.UntypedStorage(part.nbytes, device="meta")  # type: ignore[no-untyped-call]
            self._stand_ins[number] = meta, dtype, self._path
        stand_in, known_dtype, known_path = self._stand_ins[number]
        if dtype != known_dtype:
            raise StateError(
                f"{known_path} and {self._path} view the same memory as {known_dtype} and {tensor.dtype}, "
                "which a torch file cannot hold; save one of them, or a clone"
            )
        typed = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=stand_in, dtype=dtype, _internal=True
        )
        # torch.load puts the tensor there: a file from a GPU job loads on any machine.
        typed._fake_device = torch.device("cpu")
        offset = tensor.storage_offset() - part.start_bytes // tensor.itemsize if tensor.numel() else 0
        return (typed, offset, *arguments[2:])


def _pickler(jobs: list[Pickling], finish: Callable[[bytes], bytes]) -> type[pickle.Pickler]:
    """Return the class that torch.save derives its pickler from."""

    class Pickler(ReadablePickler):
        def reducer_override(self, value: Any) -> Any:
            (job,) = jobs
            if isinstance(value, torch.Tensor):
                return job.reduce(value)
            super().reducer_override(value)
            job.kinds.add(kind_of(value))
            return NotImplemented

        def finalize(self, pickled: bytes) -> bytes:
            (job,) = jobs
            job.kinds.update(builtins_in(pickled))
            job.note_persistent_ids(self.persistent_id)
            return finish(pickled)

    return Pickler


def kind_of(value: Any) -> Any:
    return value if isinstance(value, type | FunctionType | BuiltinFunctionType) else type(value)


def builtins_in(pickled: bytes) -> list[bytes]:
    """Find the builtins that pickle writes without calling `reducer_override`; weights_only refuses frozenset()."""
    return _BUILTINS.findall(pickled) if b"builtin" in pickled else []


def load_structure(file: SparseFile) -> Any:
    """Load the zip as plain `torch.load` would, without tensor bytes; raises one of `REFUSED`."""
    file.seek(0)
    return torch.load(cast(IO[bytes], file), weights_only=True, map_location="meta")


def explain_refusal(tree: Any, found: Survey, error: BaseException) -> StateError:
    """Return the error to raise for `error`: names the smallest part of `tree` that torch refuses, and the remedy."""
    path, node, reason = "", tree, error
    seen: set[int] = set()
    while id(node) not in seen:
        seen.add(id(node))
        for key, value in children(node):
            refused = _loading_error(value, found)
            if refused is None and isinstance(node, dict):
                refused = _loading_error(key, found)
                if refused is not None:
                    path, node, reason = f"a key of {path or 'the state'}, {key!r},", key, refused
                    break
            elif refused is not None:
                path, node, reason = f"{path}/{key}" if path else str(key), value, refused
                break
    kind = f"{type(node).__module__}.{type(node).__qualname__}".removeprefix("builtins.")
    cause = unpickler_cause(reason).split(" was not an allowed", 1)[0][:200]
    advice = "torch.as_tensor(...)" if kind.startswith("numpy.") else "a tensor, number, string, list or dict"
    return StateError(
        f"{path or 'the state'} is {kind}, which plain torch.load(weights_only=True) cannot read back ({cause}); "
        f"convert it to {advice}, or leave it out of the state"
    )


def _loading_error(value: Any, found: Survey) -> BaseException | None:
    file = SparseFile()
    try:
        Pickling(found).save(value, file, bytes)
        load_structure(file)
    except REFUSED as error:
        return error
    return None
