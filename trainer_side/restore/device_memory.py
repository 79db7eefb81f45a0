"""Chooses the tensors of a checkpoint that are read straight into device memory, and allocates that memory.

Live tensors are not read into. They are loaded from that memory once all CRCs are right: `load_state_dict` copies on
the device, an optimizer adopts its moments, and `ReadPlan.copy_remaining` copies the parts of split tensors. Only
tensors that loading would copy to the device unchanged, in the same dtype, are read there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer_side.ranks.peers import Peers, gather
from trainer_side.restore.device_sections import DeviceSections, PinnedAllocator
from trainer_side.restore.split_parts import PlacedParts
from trainer_side.restore.structure import Structure, unique_paths
from trainer_side.restore.targets import RegionTarget, bytes_in, same_bits
from trainer_side.restore.uncast import device_overrides
from trainer_side.state.accelerator import module_of
from trainer_side.state.optimizer_places import match_parameters
from trainer_side.state.split_tensor import is_split
from trainer_side.state.tree import NamedTensor, tensor_paths, tensor_refusal

_SPARE_SHARE = 10  # a tenth of the device's memory stays free
_NO_BYTES = np.empty(0, np.uint8)


class _DeviceRequest(NamedTuple):
    """The tensors that this rank wants to read into its device."""

    device: torch.device | None
    whole: dict[int, list[NamedTensor]]  # entry → the tensors in it; the entry is read whole
    regions: dict[int, list[int]]  # entry → numbers of this rank's regions of it

    def nbytes(self, structure: Structure, placed: PlacedParts) -> int:
        regions = [(placed.regions[entry].regions, some) for entry, some in self.regions.items()]
        parts = [own[number] for own, some in regions for number in some]
        whole_bytes = sum(structure.storages[entry].nbytes() for entry in self.whole)
        return whole_bytes + sum(part.comb.nbytes for part in parts if not part.is_fresh)


_NOTHING = _DeviceRequest(None, {}, {})


def allocate_on_device(
    structure: Structure,
    placed: PlacedParts,
    state: Mapping[str, Any],
    live: Mapping[str, Any],
    allocate_pinned: PinnedAllocator,
    peers: Peers,
    on_host: Collection[int] = (),
) -> DeviceSections | None:
    """Allocate memory on the device for tensors that loading would copy there. Training thread; collective.

    An entry that is read whole goes to a device on every rank or on none, since the ranks exchange it. `structure`:
    After `adopt` and `place_parts`; its storages are replaced. `placed`: The parts of this rank; those on a device get
    memory there. `live`: Result of `live_trees`. `allocate_pinned`: Allocates page-locked memory. `on_host`: Tensors of
    the tree that stay in host memory (`uncast.offloaded`). Returns None if this rank has no tensor for a device, or a
    rank lacks room.
    """
    request = _device_request(structure, placed, dict(_destinations(state, live, structure.tree, on_host)))
    is_empty = not request.whole and not request.regions
    has_room = request.device is None or _has_room(request.device, request.nbytes(structure, placed))
    if peers.all_agree(is_empty or not has_room):
        return None
    offered = [json.loads(said) for said in gather(peers, json.dumps(sorted(request.whole)).encode())]
    everywhere = set(request.whole).intersection(*offered)
    whole = {entry: request.whole[entry] for entry in request.whole if entry in everywhere}
    request = request._replace(whole=whole)
    allocated: dict[int, torch.Tensor] = {}
    parts: dict[tuple[int, int], RegionTarget] = {}
    if has_room and request.device is not None:
        try:
            for entry in request.whole:
                nbytes = structure.storages[entry].nbytes()
                allocated[entry] = torch.empty(nbytes, dtype=torch.uint8, device=request.device)
            parts = {
                (entry, number): _on_device(placed.regions[entry].regions[number])
                for entry, some in request.regions.items()
                for number in some
            }
        except torch.OutOfMemoryError:
            has_room = False
    if not peers.all_agree(has_room) or request.device is None:
        return None
    for entry, group in request.whole.items():
        storage = allocated[entry].untyped_storage()
        for _, tensor in group:
            there = torch.empty(0, dtype=tensor.dtype, device=request.device)
            tensor.data = there.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        structure.storages[entry] = storage
    for (entry, number), part in parts.items():
        placed.regions[entry].regions[number] = part
    return DeviceSections(request.device, allocate_pinned)


def _device_request(
    structure: Structure, placed: PlacedParts, wanted: Mapping[str, _Destination]
) -> _DeviceRequest:
    groups: dict[int, list[NamedTensor]] = {}
    tensors = structure.tensors
    unambiguous = unique_paths(path for path, _ in tensors)
    for named in tensors:
        if named.tensor.layout is torch.strided and not is_split(named.tensor):
            groups.setdefault(named.tensor.untyped_storage().data_ptr(), []).append(named)
    whole: dict[int, list[NamedTensor]] = {}
    devices: set[torch.device] = set()
    for entry, storage in structure.storages.items():
        group = groups.get(storage.data_ptr(), [])
        destinations = {
            _device_of(named, wanted.get(named.path), len(group)) if named.path in unambiguous else None
            for named in group
        }
        if len(destinations) == 1 and entry not in placed.regions:
            (device,) = destinations
            if device is not None:
                whole[entry] = group
                devices.add(device)
    regions: dict[int, list[int]] = {}
    for entry, target in placed.regions.items():
        if entry not in structure.storages:  # else the entry is also read whole, into host memory
            for number, region in enumerate(target.regions):
                if region.copies is not None and same_bits(*region.copies):
                    device = region.copies[1].device
                    if device.type == "cuda":
                        regions.setdefault(entry, []).append(number)
                        devices.add(device)
    # With several devices, everything goes through host memory.
    return _DeviceRequest(devices.pop(), whole, regions) if len(devices) == 1 else _NOTHING


def _on_device(region: RegionTarget) -> RegionTarget:
    assert region.copies is not None
    read, local = region.copies
    if region.is_fresh:
        return dataclasses.replace(region, memory=_NO_BYTES, device=bytes_in(local), copies=None)
    there = torch.empty(region.comb.nbytes, dtype=torch.uint8, device=local.device)
    shaped = there.view(read.dtype).as_strided(read.shape, read.stride())
    return dataclasses.replace(region, memory=_NO_BYTES, device=there, copies=(shaped, local))


class _Destination(NamedTuple):
    """Where loading puts a tensor. `is_exclusive`: the object keeps the tensor itself, which must not share memory."""

    device: torch.device
    dtype: torch.dtype | None
    is_exclusive: bool


def _device_of(named: NamedTensor, destination: _Destination | None, tensors: int) -> torch.device | None:
    """The device for a tensor of the tree; None: host memory. `tensors`: how many share its storage."""
    tensor = named.tensor
    if destination is None or tensor_refusal(tensor) is not None:
        return None
    if destination.dtype not in (None, tensor.dtype):
        return None
    whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return None if destination.is_exclusive and (tensors > 1 or not whole) else destination.device


def _destinations(
    state: Mapping[str, Any], live: Mapping[str, Any], tree: Mapping[str, Any], on_host: Collection[int]
) -> Iterator[tuple[str, _Destination]]:
    for name, value in state.items():
        if name not in tree or name not in live:
            continue
        if isinstance(value, torch.optim.Optimizer):
            yield from _moments(name, value, tree[name], on_host)
        elif isinstance(value, torch.nn.Module | torch.Tensor):
            here = tensor_paths({name: live[name]})
            unambiguous = unique_paths(path for path, _ in here)
            for path, tensor in here:
                if path in unambiguous and tensor_refusal(tensor) is None and tensor.device.type == "cuda":
                    yield path, _Destination(tensor.device, tensor.dtype, is_exclusive=False)


def _moments(
    name: str, optimizer: torch.optim.Optimizer, saved: Any, on_host: Collection[int]
) -> Iterator[tuple[str, _Destination]]:
    """Yield the destinations in torch's own loading: the parameter's device, for step counters only if configured."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    pairs, others = match_parameters(optimizer, saved), device_overrides(optimizer, saved, on_host)
    groups = saved["param_groups"] if pairs else ()
    group_of = {number: group for group in groups for number in group["params"]}
    for number, parameter in pairs:
        moments = saved["state"].get(number)
        if parameter.device.type != "cuda" or tensor_refusal(parameter) or not isinstance(moments, Mapping):
            continue
        for key, moment in moments.items():
            path = f"{name}/state/{number}/{key}"
            if not isinstance(moment, torch.Tensor) or key in others.get(number, ()):
                continue
            if key != "step":
                yield path, _Destination(parameter.device, None, is_exclusive=True)
            elif group_of[number].get("capturable") or group_of[number].get("fused"):
                yield path, _Destination(parameter.device, torch.float32, is_exclusive=True)


def _has_room(device: torch.device, nbytes: int) -> bool:
    module = module_of(device)
    free_bytes, total_bytes = module.mem_get_info(device)
    unused_bytes = module.memory_reserved(device) - module.memory_allocated(device)
    return bool(nbytes + total_bytes // _SPARE_SHARE <= free_bytes + unused_bytes)
