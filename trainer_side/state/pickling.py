"""`torch.save` without the tensor bytes: its pickle, its zip, and whether plain `torch.load` takes them back.

    Pickling.save   the whole zip, with holes         load_structure   reads it back, tensors on `meta`
    Pickling.head   data.pkl alone: a save's share    blame            which value is it that torch refuses?
    Pickling.ready  how torch has pickled each tensor ─► Ready.pickle: data.pkl alone, without asking torch again

Each storage is replaced by a `meta` stand-in of the size that is used; torch then asks for none of its bytes.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
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
from trainer_side.state.containers import children
from trainer_side.state.empty_bytes import with_readable_empty_bytes
from trainer_side.state.numpy_scalars import MetNumpyScalar, is_scalar, with_python_scalars
from trainer_side.state.readable_pickler import ReadablePickler
from trainer_side.state.sparse_file import SparseFile
from trainer_side.state.survey import Survey

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
    """Ends torch.save after the pickle; it is no error."""


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
        # By id(); what has the id is kept with it, else another object could come by the same one.
        self._reduced: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}
        self._persistent_ids: dict[int, tuple[Any, Any]] = {}

    def save(self, value: Any, file: SparseFile, finish: Callable[[bytes], bytes]) -> None:
        """Write the zip of `value`; `finish` gives the bytes of data.pkl from the pickle."""
        jobs = [self]
        module = SimpleNamespace(Pickler=_pickler(jobs, finish), __name__="pickle")
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(value, cast(IO[bytes], file), pickle_module=module)
        finally:
            jobs.clear()  # a class lives until the garbage is collected, and so would all tensors

    def head(self, value: Any) -> bytes:
        """The pickle of `value` alone."""
        taken: list[bytes] = []

        def stop(pickled: bytes) -> bytes:
            taken.append(pickled)
            raise _HeadOnly

        with contextlib.suppress(_HeadOnly):
            self.save(value, SparseFile(), stop)
        return taken[0]

    def ready(self, tensors: Sequence[torch.Tensor]) -> Ready | None:
        """What it takes to pickle tensors like these again; None if one was pickled in a way that is not kept."""
        kept: dict[int, tuple[Any, ...] | None] = {}
        for tensor in tensors:
            if id(tensor) not in kept:
                kept[id(tensor)] = self._kept(tensor)
        if None in kept.values():
            return None
        stand_ins = {key: StandIn(cast(tuple[Any, ...], reduction)) for key, reduction in kept.items()}
        return Ready([stand_ins[id(tensor)] for tensor in tensors], torch.serialization.DEFAULT_PROTOCOL)

    def _kept(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """How `tensor` was pickled, without what belongs to this one tensor."""
        function, (on, *rest) = self._reduced.get(id(tensor), (tensor, (None, (None,))))[1]
        # The hooks, which torch leaves out, are an empty dict; asking that for its reduction takes time.
        rest = [_Reduced((OrderedDict, ())) if type(one) is OrderedDict and not one else one for one in rest]
        if function is _rebuild_parameter:
            inner = self._kept(on)
            return None if inner is None else (function, (_Reduced(inner), *rest))
        if function in (_rebuild_tensor_v2, _rebuild_tensor_v3) and id(on) in self._persistent_ids:
            return function, (_Persistent(self._persistent_ids[id(on)][1]), *rest)
        return None

    def reduce(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """How pickle is to write `tensor`: as torch would, on the stand-in of its storage."""
        reduction = self._reduction(tensor)
        self._reduced[id(tensor)] = (tensor, reduction)
        return reduction

    def note_persistent_ids(self, persistent_id: Callable[[Any], Any]) -> None:
        """Keep what torch wrote for each storage."""
        for _, reduction in self._reduced.values():
            typed = reduction[1][0]
            if isinstance(typed, torch.storage.TypedStorage):
                self._persistent_ids[id(typed)] = (typed, persistent_id(typed))

    def _reduction(self, tensor: torch.Tensor) -> tuple[Any, ...]:
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
                f"near {self._path}: a tensor of shape {list(tensor.shape)} is inside another object than a dict, "
                "list or tuple, where holdfast cannot find it; put it into one of these"
            )
        # Dtypes without a storage class of their own are pickled on bytes.
        dtype = tensor.dtype if function is _rebuild_tensor_v2 else torch.uint8
        part = self._found.parts[number]
        if number not in self._stand_ins:
            self._stand_ins[number] = (_stand_in(part.nbytes), dtype, self._path)
        stand_in, known_dtype, known_path = self._stand_ins[number]
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


def _pickler(jobs: list[Pickling], finish: Callable[[bytes], bytes]) -> type[pickle.Pickler]:
    """The class that torch.save derives its pickler from."""

    class Pickler(ReadablePickler):
        def reducer_override(self, value: Any) -> Any:
            (job,) = jobs
            if isinstance(value, torch.Tensor):
                return job.reduce(value)
            super().reducer_override(value)
            job.kinds.add(_kind(value))
            return NotImplemented

        def finished(self, pickled: bytes) -> bytes:
            (job,) = jobs
            job.kinds.update(_builtins_in(pickled))
            job.note_persistent_ids(self.persistent_id)
            return finish(pickled)

    return Pickler


def _kind(value: Any) -> Any:
    return value if isinstance(value, type | FunctionType | BuiltinFunctionType) else type(value)


def _builtins_in(pickled: bytes) -> list[bytes]:
    """Python pickles its own plain classes without asking; but weights_only refuses frozenset()."""
    return _BUILTINS.findall(pickled) if b"builtin" in pickled else []


class _Reduced:
    """Is pickled as told."""

    __slots__ = ("reduction",)

    def __init__(self, reduction: tuple[Any, ...]) -> None:
        self.reduction = reduction


class StandIn(_Reduced):
    """The placeholder of a tensor in a tree that is pickled without it."""

    __slots__ = ()


class _Persistent:
    """Stands for a storage."""

    __slots__ = ("persistent_id",)

    def __init__(self, persistent_id: Any) -> None:
        self.persistent_id = persistent_id


class Ready:
    """A pickler's view of a tree: its tensors become placeholders, all else is pickled as it is.

    Args:
        stand_ins: Of each tensor; the same tensor has the same one.
        protocol: Of the pickle.
    """

    def __init__(self, stand_ins: list[StandIn], protocol: int) -> None:
        self._stand_ins, self._protocol = stand_ins, protocol

    def stand_ins(self, tensors: Sequence[torch.Tensor]) -> dict[int, StandIn]:
        """By id(): what stands for each of these, which are like those that this was made of, in the same order."""
        return dict(zip(map(id, tensors), self._stand_ins, strict=True))

    def pickle(self, value: Any, stand_ins: Mapping[int, StandIn]) -> tuple[bytes, set[Any]]:
        """The pickle of `value`, and the classes in it (see `Pickling.kinds`), except those of tensors. Any thread.

        Args:
            value: A tree, with tensors or with what stands for them.
            stand_ins: Of those that are in it.

        Raises:
            One of `REFUSED`: `Pickling.head` would raise, too, and say why.
        """
        try:
            out, kinds = self._dumped(value, stand_ins)
        except MetNumpyScalar:
            out, kinds = self._dumped(with_python_scalars(value), stand_ins)
        pickled = with_readable_empty_bytes(out)
        kinds.update(_builtins_in(pickled))
        return pickled, kinds

    def _dumped(self, value: Any, stand_ins: Mapping[int, StandIn]) -> tuple[bytes, set[Any]]:
        out = io.BytesIO()
        pickler = _ReadyPickler(out, self._protocol, stand_ins)
        try:
            pickler.dump(value)
        finally:
            pickler.forget()
        return out.getvalue(), pickler.kinds


# Asked for the persistent id of everything that is pickled, which is Python code for each number and string if it is
# written in Python, this says None in no time.
_never_persistent = cast(Callable[[Any], Any], deque[Any](maxlen=0).append)


class _ReadyPickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, protocol: int, stand_ins: Mapping[int, StandIn]) -> None:
        super().__init__(out, protocol)
        self.kinds: set[Any] = set()
        self._stand_ins = stand_ins
        self._ask = self._persistent_id
        self.persistent_id = _never_persistent  # type: ignore[method-assign]

    def forget(self) -> None:
        """No longer refer to itself: what was pickled would live until the garbage is collected."""
        self.persistent_id = _never_persistent  # type: ignore[method-assign]
        del self._ask

    def reducer_override(self, value: Any) -> Any:
        if type(value) is _Reduced:
            return value.reduction
        stand_in = value if type(value) is StandIn else self._stand_ins.get(id(value))
        if stand_in is not None:
            self.persistent_id = self._ask  # type: ignore[method-assign]
            return stand_in.reduction
        if isinstance(value, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
            raise pickle.PicklingError("a tensor that the survey has not found")
        if is_scalar(value):
            raise MetNumpyScalar
        self.kinds.add(_kind(value))
        return NotImplemented

    def _persistent_id(self, value: Any) -> Any:
        if type(value) is not _Persistent:
            return None
        self.persistent_id = _never_persistent  # type: ignore[method-assign]
        return value.persistent_id


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
