"""A restore into tensors on the device: the same bits as tensor by tensor, but in sections, through locked memory."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import DamageError
from holdfast.store.posix import PosixStore
from tests.late.control import LateMachine
from tests.support.slices import checkpoint, keep
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore import device_memory, device_sections
from trainer_side.restore.device_sections import DeviceSections, SectionPart, SectionWindow
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import RestoreOptions
from trainer_side.save.host_memory import locked_buffer
from trainer_side.state.tree import tensor_paths
from trainer_side.tiers.open_tiers import open_tier

pytestmark = pytest.mark.late("lazy", "dice:1")
PLACES = pytest.mark.parametrize("place", ["tier", "store"])
HOW: list[dict[str, Any]] = [{}, {"fused": True}, {"capturable": True, "fused": True}]
CHUNK_BYTES = 1 << 16


class Average:
    """An object of the script's own that keeps the tensors it is given."""

    def __init__(self, value: float) -> None:
        self.kept = torch.full((50,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.kept = saved["kept"]


class Tied(torch.nn.Module):
    """Many small layers, a large one with two names, views of one storage, a buffer, and a frozen bfloat16."""

    def __init__(self, value: int) -> None:
        super().__init__()
        torch.manual_seed(value)
        self.large = torch.nn.Linear(300, 300)
        self.small = torch.nn.ModuleList(torch.nn.Linear(7, 5) for _ in range(12))
        self.add_module("again", self.large)
        self.frozen_half = torch.nn.Parameter(torch.randn(1001).bfloat16(), requires_grad=False)
        self.register_buffer("seen", torch.full((3,), value))
        flat = torch.randn(64)
        self.register_buffer("first", flat[:32])
        self.register_buffer("second", flat[32:])


def state_of(value: int, device: str, how: Mapping[str, Any], *, steps: int) -> dict[str, Any]:
    model = Tied(value).to(device)
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, **(how if device == "cuda" else {}))
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    if how and device == "cpu":  # as it would be saved from the device
        for group in optimizer.param_groups:
            group.update(how)
    bare = torch.arange(5.0, device=device) * value
    return {"model": model, "optimizer": optimizer, "bare": bare, "own": Average(value), "plain": [value]}


def leaves(state: Mapping[str, Any]) -> dict[str, tuple[str, torch.dtype, bytes]]:
    """Every tensor with its device, its dtype and its bytes."""
    trees = {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in state.items()}
    return {
        path: (
            str(tensor.device),
            tensor.dtype,
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for path, tensor in tensor_paths(trees)
    }


def on_device(found: Mapping[str, tuple[str, torch.dtype, bytes]]) -> dict[str, bytes]:
    return {path: data for path, (device, _, data) in found.items() if device != "cpu"}


class Kept:
    """A checkpoint in a memory tier or in a store."""

    def __init__(self, saved: Mapping[str, Any], place: str, folder: Path) -> None:
        self.made, self.place, self.folder = (
            checkpoint(lambda _: saved, ranks=1, step=3, chunk_bytes=CHUNK_BYTES),
            place,
            folder,
        )
        (folder / "tier").mkdir()
        self.tier = open_tier(f"memory:{folder / 'tier'}", "/run")
        if place == "tier":
            keep(self.tier, self.made, 0)
            self.tier.close()
        else:
            self.made.publish(folder / "run")

    def bring_back(self, state: dict[str, Any], *, locked: bool = True) -> None:
        in_tier = self.place == "tier"
        restored = restore(
            state,
            None if in_tier else PosixStore(self.folder / "run"),
            LonePeers(),
            events=None,
            tiers=[self.tier] if in_tier else [],
            options=RestoreOptions(allocate_pinned=locked_buffer if locked else None),
        )
        assert restored is not None
        assert restored.step == 3

    def damage(self) -> None:
        """Flip a bit in the middle of the file."""
        pattern = "tier/*/*.slots" if self.place == "tier" else "run/*.pt"
        (path,) = self.folder.glob(pattern)
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // (4 if self.place == "tier" else 2))
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))


@PLACES
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("steps", [0, 1])
def test_the_bits_and_devices_are_those_of_loading_tensor_by_tensor(
    place: str, how: dict[str, Any], steps: int, tmpfs: Path
) -> None:
    saved = state_of(7, "cpu", how, steps=2)
    kept = Kept(saved, place, tmpfs)
    mine, reference = (state_of(99, "cuda", how, steps=steps) for _ in range(2))
    kept.bring_back(mine)
    kept.bring_back(reference, locked=False)
    assert leaves(mine) == leaves(reference)
    assert {path: data for path, (_, _, data) in leaves(mine).items()} == {
        path: data for path, (_, _, data) in leaves(saved).items()
    }
    assert mine["own"].kept.device.type == "cpu"
    mine["optimizer"].step()


class Sections:
    """Records the sections that a restore sends to the device."""

    def __init__(self, late: LateMachine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[int] = []
        self.streams: dict[int, int] = {}  # stream ─► bytes copied on it before
        self.expected_bytes = 0
        self._late = late
        self._send = DeviceSections.send

        def send(way: DeviceSections, window: SectionWindow, parts: Sequence[SectionPart]) -> None:
            self.send(way, window, parts)

        monkeypatch.setattr(DeviceSections, "send", send)

    def send(self, way: DeviceSections, window: SectionWindow, parts: Sequence[SectionPart]) -> None:
        assert window.section.is_pinned()
        if not parts:
            return
        if not hasattr(way._local, "stream"):
            way._local.stream = way._new_stream()
        is_dealt = len(parts) >= device_sections._WHOLE_FROM or any(part.runs > 1 for part in parts)
        stream = (way._stream if is_dealt else way._local.stream).cuda_stream
        if stream not in self.streams:  # other restores may have used it before
            self.streams[stream] = self._late.copied(stream).to_device
        self.parts.append(len(parts))
        if is_dealt:
            begin = min(part.begin for part in parts)
            self.expected_bytes += max(part.end for part in parts) - begin // 8 * 8
        else:
            self.expected_bytes += sum(part.run_bytes for part in parts)
        self._send(way, window, parts)

    def to_device_bytes(self) -> int:
        return sum(self._late.copied(stream).to_device - before for stream, before in self.streams.items())


@PLACES
def test_sections_cross_through_locked_windows_and_nothing_from_pageable_memory(
    place: str, tmpfs: Path, late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = HOW[2]  # its counters of steps lie on the device, too
    kept = Kept({**state_of(7, "cpu", how, steps=1), "own": 1}, place, tmpfs)
    state = {**state_of(99, "cuda", how, steps=0), "own": 1}
    for _ in range(2):  # mapping memory for the first time waits for the device
        kept.bring_back(state)
    gc.collect()  # other tests have left locked memory
    sections = Sections(late, monkeypatch)
    torch.cuda.synchronize()
    torch._C._host_emptyCache()
    pinned, pageable, waits = late.pinned_bytes(), late.count("pageable_copies"), late.host_waits()
    kept.bring_back(state)
    assert late.count("pageable_copies") == pageable
    assert late.host_waits() == waits + 1, "this thread waits once, at the end"
    assert sections.to_device_bytes() == sections.expected_bytes
    assert max(sections.parts) >= device_sections._WHOLE_FROM > min(sections.parts)
    assert len(sections.parts) <= 2 * kept.made.layout.chunks
    torch._C._host_emptyCache()
    assert late.pinned_bytes() == pinned, "the windows are given back"


@PLACES
def test_a_damaged_byte_is_never_loaded(place: str, tmpfs: Path) -> None:
    kept = Kept(state_of(7, "cpu", {}, steps=1), place, tmpfs)
    kept.damage()
    state = state_of(99, "cuda", {}, steps=1)
    before = leaves(state)
    with pytest.raises(DamageError):
        kept.bring_back(state)
    assert on_device(leaves(state)) == on_device(before)


def test_without_room_for_it_on_the_device_all_is_as_before(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(state_of(7, "cpu", {}, steps=1), "tier", tmpfs)
    mine, full, reference = (state_of(99, "cuda", {}, steps=0) for _ in range(3))
    kept.bring_back(reference, locked=False)
    with monkeypatch.context() as patched:
        patched.setattr(device_memory, "_has_room", lambda *_: False)
        kept.bring_back(mine)
    empty = torch.empty

    def refuse(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8 and options.get("device") != "cpu" and size != (0,):
            raise torch.OutOfMemoryError("none left")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    kept.bring_back(full)
    monkeypatch.undo()
    assert leaves(mine) == leaves(full) == leaves(reference)


def test_moments_that_shared_memory_are_apart_as_torch_leaves_them(tmpfs: Path) -> None:
    saved = state_of(7, "cpu", {}, steps=1)
    moments = [one for one in saved["optimizer"].state.values() if one["exp_avg"].numel() == 35]
    flat = torch.arange(35.0 * len(moments))
    for number, one in enumerate(moments):
        one["exp_avg"] = flat[35 * number : 35 * number + 35].view(5, 7)
    kept = Kept(saved, "tier", tmpfs)
    mine, reference = (state_of(99, "cuda", {}, steps=0) for _ in range(2))
    kept.bring_back(mine)
    kept.bring_back(reference, locked=False)
    assert leaves(mine) == leaves(reference)
    for state in (mine, reference):
        places = {one["exp_avg"].untyped_storage().data_ptr() for one in state["optimizer"].state.values()}
        assert len(places) == len(state["optimizer"].state)


def test_another_dtype_is_converted_as_before(tmpfs: Path) -> None:
    kept = Kept(state_of(7, "cpu", {}, steps=1), "tier", tmpfs)
    states = [state_of(99, "cuda", {}, steps=0) for _ in range(2)]
    for state in states:
        state["model"].small.half()
        state["bare"] = state["bare"].to(torch.int32)
    kept.bring_back(states[0])
    kept.bring_back(states[1], locked=False)
    assert leaves(states[0]) == leaves(states[1])
