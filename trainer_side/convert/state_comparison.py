"""Compares two states tensor by tensor, for `holdfast diff`, with one storage of each side and a few blocks in memory.

    a run's checkpoint ─► Contents: its tree, and one storage at a time, CRC-32 checked ─┐
    a file ─► its tree, with mapped tensors ─────────────────────────────────────────────┴─► numbers of each path

Tensors whose entries have the same size and CRC-32 in two verified manifests are equal, and are not read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from holdfast.command.converters import ComparedFile, StateComparison, TensorDifference
from holdfast.command.output import progress_bar
from holdfast.errors import ConfigError
from holdfast.image.manifest import EntryRecord, State
from trainer_side.convert.contents import Contents, dense, part_of
from trainer_side.convert.import_source import read_source
from trainer_side.state.tree import children

_BLOCK_ELEMENTS = 1 << 20
_TEXT_CHARACTERS_MAX = 60
_SHORT_ITEMS_MAX = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ComparedState:
    """One side: its leaves by path, and the values of one tensor at a time.

    `only`: A name at the top of the state: only the tree under it. ConfigError: the file cannot be read, or is a
    folder. DamageError: it is damaged, or has another format. StateError: there is no such name, or
    `torch.load(weights_only=True)` refuses the file. StoreError: the store failed.
    """

    def __init__(self, file: ComparedFile, only: str | None) -> None:
        self._contents: Contents | None = None
        if file.store is not None and file.manifest is not None:
            self._contents = Contents(file.store, file.manifest, only=only)
            tree = self._contents.tree
        else:
            assert file.path is not None
            tree = _tree_of_file(file.path, only)
        self._is_verified = file.manifest is not None and file.manifest.state is State.VERIFIED
        self.leaves = dict(_leaves(tree, ""))
        self._loaded: tuple[int, torch.UntypedStorage] | None = None

    def record(self, tensor: torch.Tensor) -> EntryRecord | None:
        """Return the entry that holds a tensor of a verified checkpoint; else None."""
        if self._contents is None or not self._is_verified:
            return None
        entry = self._contents.entry(tensor)
        return None if entry is None else self._contents.manifest.entries[entry]

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the leaves in row-major order, read if necessary. This may free the previous one."""
        if self._contents is None or (entry := self._contents.entry(tensor)) is None:
            return tensor.detach().contiguous().resolve_conj().resolve_neg()
        if self._loaded is None or self._loaded[0] != entry:
            self._loaded = None  # first, so that only one is in memory
            self._loaded = entry, self._contents.load(entry)
        return dense(tensor, self._loaded[1])


def compare(a: ComparedFile, b: ComparedFile, *, only: str | None, quiet: bool) -> StateComparison:
    """Compare two states; for `holdfast diff`. Blocks. Raises as `ComparedState`.

    `only`: A name at the top of both states: compare only the trees under it.
    """
    one, other = ComparedState(a, only), ComparedState(b, only)
    both = [path for path in one.leaves if path in other.leaves]
    tensors: list[tuple[str, Any, Any]] = []
    values: list[tuple[str, Any, Any]] = []
    for path in both:
        first, second = one.leaves[path], other.leaves[path]
        are_tensors = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        (tensors if are_tensors else values).append((path, first, second))
    found: list[TensorDifference] = []
    unread = 0
    with progress_bar("tensors", sum(first.numel() for _, first, _ in tensors), hidden=quiet) as advance:
        for path, first, second in tensors:
            if _is_same_entry(one, other, first, second):
                unread += 1
            elif (difference := _difference(path, one, other, first, second)) is not None:
                found.append(difference)
            advance(first.numel())
    differing_values = [
        (path, _describe_value(first), _describe_value(second))
        for path, first, second in values
        if not _is_same(first, second)
    ]
    return StateComparison(
        [path for path in one.leaves if path not in other.leaves],
        [path for path in other.leaves if path not in one.leaves],
        sorted(found, key=_order),
        differing_values,
        len(tensors) - len(found),
        unread,
        len(values) - len(differing_values),
    )


def _tree_of_file(path: Any, only: str | None) -> Any:
    try:
        loaded = read_source(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if loaded.kind == "dcp":
        raise ConfigError(
            f"{path}: expected a file of torch.save or safetensors, or a run; a folder of DCP is neither"
        )
    return part_of(loaded.tree, only, str(path))


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield tensors, plain values, and containers that are empty or hold only many numbers."""
    inner = list(children(node)) if isinstance(node, dict | list | tuple) else []
    are_numbers = isinstance(node, list | tuple) and all(isinstance(one, int | float) for one in node)
    if not inner or (len(inner) > _SHORT_ITEMS_MAX and are_numbers):
        yield path, node
        return
    for key, one in inner:
        yield from _leaves(one, f"{path}/{key}" if path else str(key))


def _is_same_entry(
    one: ComparedState, other: ComparedState, first: torch.Tensor, second: torch.Tensor
) -> bool:
    mine, theirs = one.record(first), other.record(second)
    if mine is None or theirs is None or (mine.nbytes, mine.crc32) != (theirs.nbytes, theirs.crc32):
        return False
    return _geometry(first) == _geometry(second)


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), flags


def _difference(
    path: str, one: ComparedState, other: ComparedState, first: torch.Tensor, second: torch.Tensor
) -> TensorDifference | None:
    """Return the difference of two tensors; None if they are equal."""
    dtypes = _name(first.dtype), _name(second.dtype)
    shapes = tuple(first.shape), tuple(second.shape)
    if shapes[0] != shapes[1] or first.layout is not second.layout:
        return TensorDifference(path, dtypes, shapes)
    if first.layout is torch.strided:
        pair = one.values(first), other.values(second)
    else:  # of a file: no run has sparse tensors
        sparse: list[Any] = [first, second]
        mine, theirs = (tensor.to_sparse_coo().coalesce() for tensor in sparse)
        if not torch.equal(mine.indices(), theirs.indices()):
            return TensorDifference(path, dtypes, shapes)
        pair = mine.values(), theirs.values()
    numbers = compare_tensors(*pair)
    if dtypes[0] == dtypes[1] and not numbers.differing:
        return None
    return TensorDifference(path, dtypes, shapes, pair[0].numel(), *numbers)


class ComparedNumbers(NamedTuple):
    """The numbers of a `TensorDifference`. None: torch cannot convert the dtype to numbers."""

    differing: int
    max_abs: float | None = None
    mean_abs: float | None = None
    max_relative: float | None = None
    relative: float | None = None
    nonfinite: tuple[int, int] | None = None


def compare_tensors(first: torch.Tensor, second: torch.Tensor) -> ComparedNumbers:
    """Compare two dense tensors of one shape in host memory, block by block.

    Elements of one dtype differ if their bits do, so that 0.0 and -0.0 differ, and two NaNs may. Elements of two dtypes
    differ if their values do; two NaNs are equal then.
    """
    ones, others = first.reshape(-1), second.reshape(-1)
    sums = _Sums()
    differing = 0
    for begin in range(0, ones.numel(), _BLOCK_ELEMENTS):
        mine, theirs = ones[begin : begin + _BLOCK_ELEMENTS], others[begin : begin + _BLOCK_ELEMENTS]
        numbers = _numbers(mine), _numbers(theirs)
        if mine.dtype == theirs.dtype:
            differing += int((_bits(mine) != _bits(theirs)).reshape(mine.numel(), -1).any(1).sum())
        elif numbers[0] is None or numbers[1] is None:
            differing += mine.numel()
        else:
            are_nan = numbers[0].isnan() & numbers[1].isnan()
            differing += int(((numbers[0] != numbers[1]) & ~are_nan).sum())
        sums.add(*numbers)
    return sums.result(differing)


class _Sums:
    """Sums over all blocks."""

    def __init__(self) -> None:
        self._known = True
        self._finite = 0
        self._sum = self._max = self._max_relative = 0.0
        self._squares = [0.0, 0.0, 0.0]  # of the difference and of each side
        self._nonfinite = [0, 0]

    def add(self, first: torch.Tensor | None, second: torch.Tensor | None) -> None:
        if first is None or second is None:
            self._known = False
            return
        finite = first.isfinite(), second.isfinite()
        for side in (0, 1):
            self._nonfinite[side] += finite[side].numel() - int(finite[side].sum())
        both = finite[0] & finite[1]
        if not bool(both.all()):
            first, second = first[both], second[both]
        if not first.numel():
            return
        difference = (first - second).abs()
        largest = torch.maximum(first.abs(), second.abs())
        self._finite += difference.numel()
        self._sum += float(difference.sum())
        self._max = max(self._max, float(difference.max()))
        self._max_relative = max(self._max_relative, float((difference / largest).nan_to_num(0.0).max()))
        for index, one in enumerate((difference, first.abs(), second.abs())):
            self._squares[index] += float(one.square().sum())

    def result(self, differing: int) -> ComparedNumbers:
        if not self._known:
            return ComparedNumbers(differing)
        mean = self._sum / self._finite if self._finite else 0.0
        norm = math.sqrt(max(self._squares[1:]))
        relative = math.sqrt(self._squares[0]) / norm if norm else 0.0
        nonfinite = self._nonfinite[0], self._nonfinite[1]
        return ComparedNumbers(differing, self._max, mean, self._max_relative, relative, nonfinite)


def _bits(block: torch.Tensor) -> torch.Tensor:
    width = block.element_size()
    return block.view(_BITS[width]) if width in _BITS else block.view(torch.uint8).view(-1, width)


def _numbers(block: torch.Tensor) -> torch.Tensor | None:
    """Return the block as float64 or complex128; None if torch cannot convert the dtype."""
    try:
        return block.to(torch.complex128 if block.is_complex() else torch.float64)
    except (RuntimeError, NotImplementedError):
        return None


def _order(one: TensorDifference) -> tuple[float, str]:
    """Sort key: tensors without numbers first, then the largest relative difference."""
    return (-math.inf if one.relative is None or one.dtypes[0] != one.dtypes[1] else -one.relative), one.path


def _is_same(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or isinstance(first, torch.Tensor):
        return False
    try:
        if isinstance(first, list | tuple):
            return len(first) == len(second) and all(map(_is_same, first, second))
        return bool(first == second) or (first != first and second != second)
    except Exception:  # noqa: BLE001 - of a type that is not ours
        return repr(first) == repr(second)


def _describe_value(value: Any) -> str:
    """Return a value as text for people; a long value as its size and a digest."""
    if isinstance(value, torch.Tensor):
        return f"a tensor, {_name(value.dtype)} {list(value.shape)}"
    text = repr(value)
    if len(text) <= _TEXT_CHARACTERS_MAX:
        return text
    size = f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__
    return f"{size}, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
