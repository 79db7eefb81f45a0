"""Bytes of an image on their way into fresh memory of a device, section by section, through locked windows.

    a reader   window A: read ─► CRC-32 ─► crosses ═══════►│      on a stream of the restore's own
               window B:                   read ─► CRC-32 ─► crosses ═══════►│ …

A section is what one request has brought. A few tensors cross one by one; of many the whole section crosses, and they
are copied on the device by one call. The memory is not that of live tensors, which are loaded from it when all
CRCs are right: `load_state_dict` then copies on the device, and an optimizer takes its moments as they are.

Into the device go tensors that loading would bring there anyway, bit for bit: those of modules and bare tensors by
their live tensors, in their dtype, and an optimizer's moments by their parameters. All else is read into host memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from trainer_side.restore.offloaded import elsewhere
from trainer_side.restore.structure import Structure, once
from trainer_side.state.accelerator import StreamEvent, module_of, record
from trainer_side.state.tree import Named, refusal, tensor_paths

Locked = Callable[
    [int], torch.Tensor
]  # host memory of so many bytes that a device copies from without the CPU

_WINDOWS = 2  # for each reader: one is read into while the other one crosses
_WHOLE_FROM = 8  # tensors: a section with so many crosses as a whole
_SPARE_SHARE = 10  # a tenth of the device is left alone


class DeviceTarget(NamedTuple):
    """Memory of a device to which the bytes of one entry go, and the way there."""

    memory: torch.Tensor
    crossing: DeviceSections

    @classmethod
    def of(cls, storage: torch.UntypedStorage, crossing: DeviceSections) -> DeviceTarget:
        """All of a storage on the device, as bytes."""
        return cls(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), crossing)

    def put(self, inside: int, _address: int, view: memoryview) -> None:
        """Take bytes of the entry, and wait until they are there. Bytes of a section go by `DeviceSections.send`."""
        self.memory[inside : inside + view.nbytes].copy_(torch.frombuffer(view, dtype=torch.uint8))


class SectionPart(NamedTuple):
    """A part of a section: `nbytes` from `begin` of the window on go to `inside` of the target."""

    target: DeviceTarget
    inside: int
    begin: int
    nbytes: int


class SectionWindow:
    """Locked memory of one reader.

    Attributes:
        address: Where it begins. `memory`: it.
        section: The same as a tensor.
        crossed: When what was sent from it is on the device; None: nothing was.
    """

    def __init__(self, section: torch.Tensor) -> None:
        self.section, self.address, self.memory = section, section.data_ptr(), section.numpy().data
        self.crossed: StreamEvent | None = None


class DeviceSections:
    """The way of one restore to its device. `window` and `send` belong to any thread, the rest to the training thread.

    Args:
        device: A CUDA device. Memory of the targets is taken on its current stream before.
        locked: Makes the windows.
    """

    def __init__(self, device: torch.device, locked: Locked) -> None:
        self._device, self._module, self._locked = device, module_of(device), locked
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(self._module.current_stream(device))
        self._queue = threading.Lock()  # the scratch is used in the order of the stream
        self._scratch: torch.Tensor | None = None
        self._local = threading.local()
        self._windows: list[SectionWindow] = []  # readers end before what they have sent has crossed

    def window(self, nbytes: int) -> SectionWindow:
        """A window of this thread; waits until what was sent from it before has crossed."""
        mine: deque[SectionWindow] | None = getattr(self._local, "windows", None)
        if mine is None:
            mine = self._local.windows = deque(SectionWindow(self._locked(nbytes)) for _ in range(_WINDOWS))
            self._windows += mine
        mine.rotate()
        if mine[0].crossed is not None:
            mine[0].crossed.synchronize()
        return mine[0]

    def send(self, window: SectionWindow, nbytes: int, parts: Sequence[SectionPart]) -> None:
        """Queue the copies of a section of `nbytes`. The window may be read into again when `window` gives it."""
        targets = [part.target.memory[part.inside : part.inside + part.nbytes] for part in parts]
        with (
            self._queue,
            self._module.device(self._device),
            self._module.stream(self._stream),
            torch.no_grad(),
        ):
            section = window.section[:nbytes]
            if is_whole := len(parts) >= _WHOLE_FROM:
                section = self._on_device(section)
            sources = [section[part.begin : part.begin + part.nbytes] for part in parts]
            if is_whole:
                torch._foreach_copy_(targets, sources)  # one launch, or a few
            else:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            window.crossed = record(self._device)

    def finish(self) -> None:
        """Wait until all that was sent is on the device. Nobody sends any more."""
        with self._module.device(self._device), self._module.stream(self._stream):
            event = record(self._device)
        event.synchronize()
        self._windows.clear()
        self._scratch = None

    def _on_device(self, section: torch.Tensor) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < section.numel():
            self._scratch = torch.empty(section.numel(), dtype=torch.uint8, device=self._device)
        return self._scratch[: section.numel()].copy_(section, non_blocking=True)


def take_to_device(
    structure: Structure,
    state: Mapping[str, Any],
    live: Mapping[str, Any],
    locked: Locked,
    on_host: Collection[int] = (),
) -> DeviceSections | None:
    """Give tensors of the tree fresh memory on the device that loading would bring them to. Training thread.

    Args:
        structure: After `adopt`; nothing of it is split. Its storages are changed.
        state: As the script gave it.
        live: What `live_trees` gave for it.
        locked: Makes locked host memory.
        on_host: Tensors of the tree that stay there (`offloaded.py`).

    Returns:
        None: there is nothing to bring there, or no room.
    """
    wanted = dict(_destinations(state, live, structure.tree, on_host))
    groups: dict[int, list[Named]] = {}
    clear = once(path for path, _ in structure.tensors)
    for named in structure.tensors:
        if named.tensor.layout is torch.strided:
            groups.setdefault(named.tensor.untyped_storage().data_ptr(), []).append(named)
    found: dict[int, list[Named]] = {}
    devices: set[torch.device] = set()
    for index, storage in structure.storages.items():
        group = groups.get(storage.data_ptr(), [])
        ends = {
            _device_of(named, wanted.get(named.path), len(group)) for named in group if named.path in clear
        }
        if group and len(ends) == 1 and all(named.path in clear for named in group):
            (device,) = ends
            if device is not None:
                found[index] = group
                devices.add(device)
    if len(devices) != 1:  # of several devices none is preferred
        return None
    (device,) = devices
    if not _has_room(device, sum(structure.storages[index].nbytes() for index in found)):
        return None
    try:
        taken = {
            index: torch.empty(structure.storages[index].nbytes(), dtype=torch.uint8, device=device)
            for index in found
        }
    except torch.OutOfMemoryError:
        return None
    for index, group in found.items():
        storage = taken[index].untyped_storage()
        for _, tensor in group:
            there = torch.empty(0, dtype=tensor.dtype, device=device)
            tensor.data = there.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        structure.storages[index] = storage
    return DeviceSections(device, locked)


class _Destination(NamedTuple):
    """Where loading brings a tensor. `alone`: the object keeps what it is given, so it must share memory with none."""

    device: torch.device
    dtype: torch.dtype | None
    alone: bool


def _device_of(named: Named, end: _Destination | None, tensors: int) -> torch.device | None:
    """The device of a tensor of the tree, whose storage has so many; None: host memory."""
    tensor = named.tensor
    if end is None or refusal(tensor) is not None or end.dtype not in (None, tensor.dtype):
        return None
    whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return None if end.alone and (tensors > 1 or not whole) else end.device


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
            clear = once(path for path, _ in here)
            for path, tensor in here:
                if path in clear and refusal(tensor) is None and tensor.device.type == "cuda":
                    yield path, _Destination(tensor.device, tensor.dtype, alone=False)


def _moments(
    name: str, optimizer: torch.optim.Optimizer, saved: Any, on_host: Collection[int]
) -> Iterator[tuple[str, _Destination]]:
    """As torch's own loading moves them: to the device of their parameter, counters of steps only where asked to."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbered = [
        (number, group) for group in saved.get("param_groups") or () for number in group.get("params", ())
    ]
    if len(numbered) != len(parameters):
        return  # refused by load_state_dict, with a better message
    others = elsewhere(optimizer, saved, on_host)
    for (number, group), parameter in zip(numbered, parameters, strict=True):
        moments = saved["state"].get(number)
        if (
            not isinstance(moments, Mapping)
            or parameter.device.type != "cuda"
            or refusal(parameter) is not None
        ):
            continue
        for key, moment in moments.items():
            if not isinstance(moment, torch.Tensor) or key in others.get(number, ()):
                continue
            if key != "step":
                yield f"{name}/state/{number}/{key}", _Destination(parameter.device, None, alone=True)
            elif group.get("capturable") or group.get("fused"):
                yield (
                    f"{name}/state/{number}/{key}",
                    _Destination(parameter.device, torch.float32, alone=True),
                )


def _has_room(device: torch.device, nbytes: int) -> bool:
    module = module_of(device)
    free_bytes, total_bytes = module.mem_get_info(device)
    unused_bytes = module.memory_reserved(device) - module.memory_allocated(device)
    return bool(nbytes + total_bytes // _SPARE_SHARE <= free_bytes + unused_bytes)
