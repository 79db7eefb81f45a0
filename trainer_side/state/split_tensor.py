"""The part of a tensor that this rank holds: of a DTensor, or of one that the script has split by hand.

    DTensor (FSDP2, HSDP, tensor parallelism)      mesh and placements say which region of the whole it is
    Split(tensor, shape, start)                    the script says so: experts, shards of Megatron, partitions of ZeRO
    an object with __create_chunk_list__()         made for torch.distributed.checkpoint; here it becomes a `Split`
    StagePart                                      a tensor that not every rank has: all of it, one of these, or nothing

The region that a DTensor claims may differ from the bytes that it holds (uneven sizes under FSDP2 and tensor
parallelism); such a tensor is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from holdfast.errors import StateError
from holdfast.image.regions import Region
from trainer_side.whole_number import describe_value, whole_number

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_CHUNKS = "__create_chunk_list__"
_BY_HAND = "hand over what it is made of as Split(tensor, shape, start)"


class Split:
    """This rank's part of a larger tensor; stands in the state in place of a tensor.

    All ranks put a `Split` at the same path, with the same `shape` and dtype. Their parts must cover the whole without
    gaps; ranks may hold the same part. The checkpoint has the whole tensor. Restore fills `tensor` in place, even if it
    then is another part of the whole.

    Args:
        tensor: This rank's part, contiguous; any dtype, on the CPU or a CUDA device. Shape: the size of the part.
        shape: Shape of the whole tensor.
        start: Where the part begins in the whole, one number per dimension.

    Raises:
        StateError: The part is not within the whole.

    Example:
        `Checkpointer({"experts": {"up": Split(up, (64, 1024, 4096), (8 * rank, 0, 0))}})`
    """

    def __init__(self, tensor: torch.Tensor, shape: Sequence[int], start: Sequence[int]) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise StateError(f"Split: expected a tensor, got {describe_value(tensor)}")
        self.tensor = tensor
        self.shape, self.start = _numbers(shape, "shape"), _numbers(start, "start")
        fits = len(self.shape) == len(self.start) == tensor.dim() and all(
            begin >= 0 and begin + size <= whole
            for begin, size, whole in zip(self.start, tensor.shape, self.shape, strict=True)
        )
        if not fits:
            raise StateError(
                f"Split: a part of shape {list(tensor.shape)} that begins at {list(self.start)} is not within a tensor "
                f"of shape {list(self.shape)}"
            )

    def __repr__(self) -> str:
        return f"Split(shape={list(self.shape)}, start={list(self.start)}, size={list(self.tensor.shape)})"


def _numbers(values: Any, name: str) -> tuple[int, ...]:
    try:
        given = tuple(values)
    except TypeError as error:
        raise StateError(
            f"Split: {name}: expected one number per dimension, got {describe_value(values)}"
        ) from error
    return tuple(whole_number(number, f"Split: {name}", error=StateError) for number in given)


@dataclass(frozen=True, slots=True)
class StagePart:
    """A tensor that not every rank has (pipeline stages), in the combined tree of all ranks."""

    value: Any  # the tensor, DTensor or `Split`; an empty tensor if this rank does not have it
    shape: tuple[int, ...]
    is_present: bool  # this rank has it


class HeldPart(NamedTuple):
    """The part of a tensor that this rank holds."""

    shape: tuple[int, ...]
    region: Region  # of the whole; empty if this rank holds no part
    local: torch.Tensor  # its elements: a plain tensor of the region's size


def is_split(value: object) -> bool:
    """Whether the value is a part of a tensor: `held_part` returns which."""
    return hasattr(type(value), _CHUNKS) or isinstance(value, Split | StagePart) or is_dtensor(value)


def manual_split(value: object) -> Split | None:
    """Return a tensor that is split by hand as a `Split`; None for DTensors and tensors that are not split. StateError,
    without the path: an object with a chunk list does not hold its part in one piece of its own memory.
    """
    if isinstance(value, Split):
        return value
    return _split_from_chunks(value) if hasattr(type(value), _CHUNKS) and not is_dtensor(value) else None


def held_part(value: object) -> HeldPart | None:
    """Return the part of a split tensor on this rank; None for anything else. Training thread.

    StateError: the tensor cannot be saved, or restored into, as it is; the message lacks the path.
    """
    if isinstance(value, StagePart):
        if not value.is_present:
            return HeldPart(value.shape, Region((0,), (0,)), value.value)
        if not is_split(value.value):
            local = _plain(value.value.detach())
            return HeldPart(value.shape, Region((0,) * len(value.shape), value.shape), local)
        value = value.value
    if is_dtensor(value):
        return _part_of_dtensor(value)  # type: ignore[arg-type]
    split = manual_split(value)
    if split is None:
        return None
    local = split.tensor.detach()
    return HeldPart(split.shape, Region(split.start, tuple(local.shape)), _plain(local))


def held_part_at(path: str, value: object) -> HeldPart | None:
    """As `held_part`; the message has the path."""
    try:
        return held_part(value)
    except StateError as error:
        raise StateError(f"{path} is {error}") from error


def live_of(value: Any) -> torch.Tensor:
    """Return the tensor in which torch counts in-place changes: for a DTensor itself, not its local tensor."""
    if isinstance(value, StagePart):
        return live_of(value.value)
    split = manual_split(value)
    tensor: torch.Tensor = value if split is None else split.tensor
    return tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the memory: a DTensor's local tensor, else the tensor itself. Cheap; never raises."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


def writable(value: object) -> AbstractContextManager[object]:
    """Context in which a tensor or a module can be filled in place, even if it was made in inference mode."""
    if isinstance(value, torch.nn.Module):
        tensors = [one for one in (*value.parameters(), *value.buffers()) if not is_lazy(one)]
        made_in_mode = any(tensor.is_inference() for tensor in tensors)
        return torch.inference_mode() if made_in_mode else nullcontext()
    if isinstance(value, torch.Tensor):
        return torch.inference_mode() if value.is_inference() else torch.no_grad()
    return nullcontext()


def is_dtensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and _is_dtensor_class(type(value))


@lru_cache(maxsize=256)  # called for each tensor several times at each save, on the training thread
def _is_dtensor_class(kind: type) -> bool:
    # By name, so that scripts without DTensors need not import torch.distributed.tensor.
    return any(
        base.__module__.startswith("torch.distributed.tensor") and base.__qualname__ == "DTensor"
        for base in kind.__mro__
    )


def _split_from_chunks(value: Any) -> Split:
    """Make a `Split` from the object's chunk list for torch.distributed.checkpoint, and its `shape` of the whole."""
    kind = f"a {type(value).__module__}.{type(value).__qualname__}"
    try:
        parts, shape = _parts_of(value), tuple(map(int, value.shape))
    except Exception as error:  # the user's code may raise anything; kept as the cause
        raise StateError(
            f"{kind}, which has {_CHUNKS}(), and cannot be asked for its part and its shape: {error!r}; {_BY_HAND}"
        ) from error
    if len(parts) != 1:
        raise StateError(
            f"{kind} of {len(parts)} parts on this rank, expected 1: {_BY_HAND}, each under a name of its own"
        )
    ((start, size, tensor, again),) = parts
    if tuple(tensor.shape) != size:
        raise StateError(
            f"{kind} that says it has {list(size)} of {list(shape)} on this rank, and has {list(tensor.shape)}; "
            f"{_BY_HAND}"
        )
    if type(tensor) is torch.Tensor and tensor.numel() and tensor.data_ptr() != again.data_ptr():
        raise StateError(
            f"{kind} that gives a copy of its part each time it is asked, so that nothing can be restored into it; "
            f"{_BY_HAND}"
        )
    return Split(tensor, shape, start)


def _parts_of(value: Any) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor, torch.Tensor]]:
    """Return start, size and tensor of each part, and the tensor from a second call."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    found = []
    for number, chunk in enumerate(value.__create_chunk_list__()):
        place = MetadataIndex("", chunk.offsets, number)
        tensor, again = (value.__get_tensor_shard__(place).detach() for _ in range(2))
        found.append((tuple(chunk.offsets), tuple(chunk.sizes), tensor, again))
    return found


def _part_of_dtensor(tensor: DTensor) -> HeldPart:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in tensor.placements:
        if placement.is_partial():
            raise StateError(
                f"a DTensor with the placement {placement}: a sum over ranks that is not made yet; redistribute it "
                "first"
            )
    local = _plain(tensor._local_tensor.detach())
    shape = tuple(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        raise StateError(
            f"a DTensor on a mesh without this rank ({tensor.device_mesh}); hand over only what is on "
            "the ranks of the job"
        )
    size, start = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    size, start = tuple(size), tuple(start)
    if size != tuple(local.shape) and not (0 in size and not local.numel()):
        raise StateError(
            f"a DTensor that says it has {list(size)} of {list(shape)} on this rank, and has {list(local.shape)}: "
            "uneven sizes under two kinds of sharding; pad that dimension to a multiple of the number of shards"
        )
    if not local.numel():
        return HeldPart(shape, Region((0,) * len(shape), tuple(local.shape)), local)
    return HeldPart(shape, Region(start, size), local)


def _plain(local: torch.Tensor) -> torch.Tensor:
    waiting = getattr(local, "wait", None)  # the result of a functional collective of torch may be pending
    if callable(waiting) and type(local) is not torch.Tensor:
        local = waiting()
    if type(local) is not torch.Tensor:
        kind = type(local)
        raise StateError(
            f"split, and this rank's part of it is a {kind.__module__}.{kind.__qualname__}: save the plain tensors "
            "that it is made of"
        )
    if not local.is_contiguous():
        raise StateError(
            f"split, and this rank's part of it ({list(local.shape)}, strides {list(local.stride())}) does not lie in "
            "one piece: make it contiguous()"
        )
    return local
