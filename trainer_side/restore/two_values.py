"""Finds tensors that share memory in the script, but have memory and perhaps values of their own in the checkpoint.

    script       head.weight is embed.weight          or views that overlap, or one tensor in two objects of the state
    checkpoint   head.weight, embed.weight            each with bytes of its own
        │ same bytes     they are loaded
        └ other bytes    StateError with both names, before anything is loaded

If a manifest has the CRC-32 of each, these are compared before a byte is read. Otherwise (slices of local tiers, views)
the bytes are read outside live memory, and compared (`check_suspects`) before they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.errors import StateError
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from trainer_side.restore.structure import entry_at, unique_paths
from trainer_side.state.optimizer_places import reachable
from trainer_side.state.split_tensor import local_of
from trainer_side.state.tree import tensor_paths, view_key

_ALIGNED_BYTES = 16  # of the largest dtype


class _LiveView(NamedTuple):
    """A tensor of the script: its part on this rank, and the addresses where that part begins and ends."""

    path: str
    local: torch.Tensor
    begin: int
    end: int


Suspects = Sequence[Sequence[_LiveView]]
"""Groups of tensors that share memory in the script but not in the checkpoint."""


def check_suspects(groups: Suspects, tree: Any, step: int) -> None:
    """Compare the bytes of each group after the read. Training thread. StateError: two values differ; names both."""
    if not groups:
        return
    saved = {path: local_of(tensor) for path, tensor in tensor_paths(tree)}
    for group in groups:
        for one, other in _find_clash(group, saved):
            raise _conflict_error(step, one, other)


def find_suspects(
    state: Mapping[str, Any],
    live: Mapping[str, Any],
    tree: Any,
    image: Manifest | Layout,
    entry_of: Mapping[int, int],
    step: int,
) -> Suspects:
    """Find the groups whose bytes must be compared after the read.

    `live`: Result of `live_trees`. `tree`: The saved tree, as it is in the file. `image`: A manifest has the CRC-32 of
    each entry. `entry_of`: Address of a storage of the tree → its entry. StateError: the CRC-32s of two tensors of a
    group differ; names both.
    """
    there = tensor_paths(tree)
    unambiguous = unique_paths(path for path, _ in there)
    saved = {path: tensor for path, tensor in there if path in unambiguous}
    undecided = []
    for group in _sharing_groups(state, live, saved):
        if _is_shared_in_file(group, saved):
            continue
        sums = [_crc_key(one, saved[one.path], image, entry_of) for one in group]
        if None in sums or any(_memory_layout(one) != _memory_layout(group[0]) for one in group):
            undecided.append(group)
            continue
        for one, crc in zip(group, sums, strict=True):
            if crc != sums[0]:
                raise _conflict_error(step, group[0].path, one.path)
    return undecided


def _conflict_error(step: int, one: str, other: str) -> StateError:
    return StateError(
        f"step {step}: {one} and {other} share memory in this script, and have different values in the checkpoint; "
        "give each memory of its own, as when it was saved, or save a checkpoint in which they are equal; nothing was "
        "loaded"
    )


def _sharing_groups(
    state: Mapping[str, Any], live: Mapping[str, Any], saved: Mapping[str, torch.Tensor]
) -> Iterator[list[_LiveView]]:
    """Yield groups of tensors at several paths that overlap in memory on this rank, and that loading copies into."""
    pools: dict[str, list[_LiveView]] = {}
    views: dict[str, set[Any]] = {}
    for path, tensor in tensor_paths({name: live.get(name, value) for name, value in state.items()}):
        name = path.partition("/")[0]
        value = state.get(name)
        if isinstance(value, torch.optim.Optimizer) or path not in saved:
            continue  # an optimizer adopts the loaded tensors
        local = local_of(tensor)
        if view_key(local) is None or not local.numel() or saved[path].shape != tensor.shape:
            continue
        if any(size > 1 and not step for size, step in zip(local.shape, local.stride(), strict=True)):
            continue  # an expanded tensor, into which nothing can be copied
        # An object of the script may replace its tensors by the loaded ones, such as the best weights so far. Module
        # tensors that it holds in one dictionary count as the state of that module.
        is_filled = isinstance(value, torch.nn.Module | torch.Tensor | dict | list | tuple)
        if not is_filled and view_key(local) not in _module_views(name, value, views):
            continue
        pool = "" if is_filled else path.rpartition("/")[0]
        last = sum((size - 1) * step for size, step in zip(local.shape, local.stride(), strict=True))
        begin = local.data_ptr()
        pools.setdefault(f"{local.device} {pool}", []).append(
            _LiveView(path, local, begin, begin + (last + 1) * local.element_size())
        )
    for pool_of in pools.values():
        yield from _overlapping(pool_of)


def _module_views(name: str, value: Any, known: dict[str, set[Any]]) -> set[Any]:
    """Return the memory of the tensors of all modules that an object holds. `known`: Cache, by name of the object."""
    if name not in known:
        modules = [one for one in reachable({name: value}) if isinstance(one, torch.nn.Module)]
        tensors = [tensor for one in modules for tensor in (*one.parameters(), *one.buffers())]
        known[name] = {view_key(local_of(tensor)) for tensor in tensors}
    return known[name]


def _overlapping(pool: list[_LiveView]) -> Iterator[list[_LiveView]]:
    group: list[_LiveView] = []
    end = 0
    for one in sorted(pool, key=lambda one: (one.begin, one.end)):
        if group and one.begin >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(one)
        end = max(end, one.end) if len(group) > 1 else one.end
    if len(group) > 1:
        yield group


def _memory_layout(one: _LiveView) -> tuple[Any, ...]:
    return one.begin, one.local.dtype, tuple(one.local.shape), one.local.stride()


def _is_shared_in_file(group: Sequence[_LiveView], saved: Mapping[str, torch.Tensor]) -> bool:
    """Whether the file has the group in one storage, at the same distances, so that all get the same bytes."""
    places = set()
    for one in group:
        tensor = saved[one.path]
        if not tensor.untyped_storage().nbytes():
            return False
        begin = tensor.storage_offset() * tensor.element_size()
        same_form = tensor.dtype == one.local.dtype and tensor.stride() == one.local.stride()
        same_form = same_form and tensor.shape == one.local.shape
        # This rank has only parts of split tensors: the parts agree if the whole tensors are one.
        form: tuple[object, ...] = begin, tensor.dtype, tensor.shape, tensor.stride()
        if same_form:
            form = (one.begin - group[0].begin - begin,)
        places.add((tensor.untyped_storage().data_ptr(), form))
    return len(places) == 1


def _crc_key(
    one: _LiveView, saved: torch.Tensor, image: Manifest | Layout, entry_of: Mapping[int, int]
) -> tuple[Any, ...] | None:
    """Return a key that is equal for tensors with the same bytes; None if the file has no CRC for this one."""
    entry = entry_at(saved, entry_of)
    if entry is None or not saved.is_contiguous() or saved.dtype != one.local.dtype:
        return None
    crc = getattr(image.entries[entry], "crc32", None)
    nbytes = saved.numel() * saved.element_size()
    return None if crc is None or nbytes != image.entries[entry].nbytes else (crc, nbytes, saved.shape)


def _find_clash(group: Sequence[_LiveView], saved: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the first pair of paths of which one would overwrite the other with different bytes, if any."""
    begin = group[0].begin // _ALIGNED_BYTES * _ALIGNED_BYTES
    nbytes = max(one.end for one in group) - begin
    memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
    values = [saved[one.path].detach().to("cpu", one.local.dtype) for one in group]
    views = [
        torch.empty(0, dtype=one.local.dtype, device="cpu").set_(
            memory, (one.begin - begin) // one.local.element_size(), one.local.shape, one.local.stride()
        )
        for one in group
    ]
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
    for number, (view, value) in enumerate(zip(views, values, strict=True)):
        if same_bytes(view, value):
            continue
        for other in range(number + 1, len(group)):
            view.copy_(value)
            views[other].copy_(values[other])
            if not same_bytes(view, value):
                yield group[number].path, group[other].path
                return


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)
