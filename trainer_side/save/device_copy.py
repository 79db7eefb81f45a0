"""Copies from a device into staging areas: queued in the training's own order, or on a stream beside the training.

    mirror   save(): live tensors ─► mirror, on the current stream │ own stream: mirror ─► host, given back on the way
    capture  save(): live tensors ─► host, on the current stream   │ what anything may change, where there is no mirror
    copy     behind the gate: live tensors ─► host, on the own stream

With a mirror of all nothing live is read after `save()`: the device itself puts whatever comes later, be it an update,
the replay of a graph or another state that is loaded, behind the copy of its own memory. So no gate is shut, and
nothing can be torn (docs/design/036-device-ordered-copy.md). Without room for one, there may be one of what anything
may change, so that none of that crosses on the training's stream. The two others are strategy C of LightCheck (ICCD
2023). Strategy D, straight into a tier, is each of them with a slot for an area.

Small tensors are gathered on the device and cross together, without a mirror in some memory that is taken for one copy.
Where there is no room for it, they cross one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from trainer_side.save.copy_plan import BATCH_BYTES_MAX, Batch
from trainer_side.save.device_lane import DeviceLane
from trainer_side.save.mirror_room import MirrorRoom
from trainer_side.state.accelerator import StreamEvent
from trainer_side.state.survey import StorageSource

_log = logging.getLogger("holdfast.trainer")

_SLOTS = 8  # so many batches are queued ahead: the device is never idle between two
_ALIGNMENT_BYTES = 512
_CAPTURED_BYTES_MAX = 8 << 20
HOST_BYTES = _SLOTS * BATCH_BYTES_MAX + _CAPTURED_BYTES_MAX  # beside the areas, at most
# A mirror is given back in sections. Each is taken by a call that maps memory: not too small, and not too many.
_SECTION_BYTES = 32 << 20
_SECTIONS_MAX = 16


class _Section:
    """Batches that lie together on the device."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.batches: list[tuple[Batch, int]] = []  # and where each begins


class Mirror:
    """A copy on the device of one save. Its memory is given back as it is brought to the host.

    Args:
        sections: In order.
        is_whole: Whether it has all that is copied, or only what anything may change.
    """

    def __init__(self, sections: Iterable[_Section], *, is_whole: bool) -> None:
        self._sections, self.is_whole = deque(sections), is_whole

    def take(self) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Each batch with its bytes, in order; once. A section that is through goes back behind what is queued."""
        while self._sections:
            section = self._sections.popleft()
            for batch, begin in section.batches:
                yield batch, section.memory[begin : begin + batch.nbytes]

    def drop(self) -> None:
        """Give back what was not taken."""
        self._sections.clear()


@dataclass(frozen=True)
class _Queued:
    """A batch on its way to the host.

    Attributes:
        bounce: Where it lands if it has to be scattered from there.
    """

    batch: Batch
    bounce: torch.Tensor | None
    event: StreamEvent


class DeviceCopy:
    """Copies from one device into staging areas. `mirror` and `capture` belong to the training thread, and take all the
    memory there is to take; `bring` and `copy` to the copy thread, `give_back` to either. They never meet: a save waits
    for the copy before. When `bring` or `copy` returns, the device has its memory back.

    Args:
        lane: The device.
        room: Says whether there may be a mirror.
    """

    def __init__(self, lane: DeviceLane, room: MirrorRoom) -> None:
        self._lane, self._room = lane, room
        self._scratch: torch.Tensor | None = None
        self._bounce: torch.Tensor | None = None
        self._captured: torch.Tensor | None = None

    # -- in save() -----------------------------------------------------------------------------------------------

    def mirror(
        self, now: Sequence[Batch], behind: Sequence[Batch], sources: Sequence[StorageSource | None]
    ) -> Mirror | None:
        """Queue copies on the device, on the current stream, of all or at least of what anything may change.

        Args:
            now: That.
            behind: The rest.
            sources: Per entry its storage.

        Returns:
            None: there is no room.
        """
        batches = (*now, *behind)
        nbytes = sum(_aligned(batch.nbytes) for batch in batches)
        is_whole = self._room.has(nbytes, self._lane.memory())
        if not is_whole:
            batches = (*now,)
            nbytes = sum(_aligned(batch.nbytes) for batch in batches)
            if not batches or not self._room.has_in_part(nbytes):
                return None
        self._take_bounce()
        try:
            sections = self._sections(batches, nbytes)
            try:
                for section in sections:
                    for batch, begin in section.batches:
                        _pack(_parts(batch, sources), section.memory[begin : begin + batch.nbytes])
            finally:
                self._lane.go_on()  # whatever becomes of it, nobody has its memory before
        except torch.OutOfMemoryError as error:
            self._room.refused()
            _log.warning("no memory on the device for a copy of %d bytes: %s", nbytes, error)
            return None
        self._room.made()
        return Mirror(sections, is_whole=is_whole)

    def capture(
        self,
        batches: Sequence[Batch],
        sources: Sequence[StorageSource | None],
        area: torch.Tensor,
        *,
        behind: Sequence[Batch] = (),
    ) -> Callable[[], None]:
        """Queue copies of `batches` into `area` on the current stream: what is queued on it later comes after them.

        Args:
            batches: What is taken now.
            sources: Per entry its storage.
            area: A staging area's memory.
            behind: What `copy` is going to copy: memory for that is taken now, too.

        Returns:
            Waits until they are there. At most one capture is under way.
        """
        needed = sum(batch.nbytes for batch in batches if len(batch.pieces) > 1)
        needed = min(needed, _CAPTURED_BYTES_MAX)
        if needed and (self._captured is None or self._captured.numel() < needed):
            self._captured = self._lane.on_host(needed)
        if any(len(batch.pieces) > 1 for batch in behind):
            self._take_bounce()
            self._take_scratch()
        at, scattered = 0, []
        with self._drained_on_error():
            for batch in batches:
                parts = _parts(batch, sources)
                if len(parts) == 1:
                    _target(batch, area).copy_(parts[0], non_blocking=True)
                    continue
                if at + batch.nbytes > needed:  # so many small tensors that they are not worth the memory
                    for part, offset in zip(parts, batch.offsets, strict=True):
                        area[offset : offset + part.numel()].copy_(part, non_blocking=True)
                    continue
                assert self._captured is not None
                bounce = self._captured[at : at + batch.nbytes]
                at += batch.nbytes
                try:
                    bounce.copy_(torch.cat(parts), non_blocking=True)
                except torch.OutOfMemoryError:
                    _one_by_one(parts, bounce)
                scattered.append((batch, bounce))
            event = self._lane.record()

        def land() -> None:
            event.synchronize()
            for batch, bounce in scattered:
                _scatter(batch, bounce, area)

        return land

    # -- in the copy thread --------------------------------------------------------------------------------------

    def bring(
        self,
        mirror: Mirror,
        area: torch.Tensor,
        cancelled: Callable[[], bool],
        arrived: Callable[[Batch], None],
    ) -> None:
        """Copy a mirror to the host; arguments as of `CopyEngine.copy`. What a cancelled one has left is given back."""
        try:
            with self._lane.beside(None):
                self._to_host(mirror.take(), (), area, cancelled, lambda _: None, arrived)
        finally:
            mirror.drop()
            self.give_back()

    def copy(
        self,
        batches: Sequence[Batch],
        sources: Sequence[StorageSource | None],
        area: torch.Tensor,
        after: StreamEvent | None,
        cancelled: Callable[[], bool],
        read: Callable[[Batch], None],
        arrived: Callable[[Batch], None],
    ) -> None:
        """Copy live `batches`; arguments as of `CopyEngine.copy`."""
        try:
            with self._lane.beside(after):
                live = ((batch, None) for batch in batches)
                self._to_host(live, sources, area, cancelled, read, arrived)
        finally:
            self.give_back()

    def give_back(self) -> None:
        """No copy is under way: what was taken of the device for one goes back."""
        self._scratch = None
        with contextlib.suppress(RuntimeError):  # of a device that has failed
            self._lane.drain()

    def _to_host(
        self,
        work: Iterable[tuple[Batch, torch.Tensor | None]],
        sources: Sequence[StorageSource | None],
        area: torch.Tensor,
        cancelled: Callable[[], bool],
        read: Callable[[Batch], None],
        arrived: Callable[[Batch], None],
    ) -> None:
        pending: deque[_Queued] = deque()

        def land() -> None:
            queued = pending.popleft()
            queued.event.synchronize()
            read(queued.batch)
            if queued.bounce is not None:
                _scatter(queued.batch, queued.bounce, area)
            arrived(queued.batch)

        with self._drained_on_error():
            for number, (batch, packed) in enumerate(work):
                if cancelled():
                    break
                if len(pending) == _SLOTS:
                    land()  # and so the slot of the same number is free
                pending.append(self._queue(batch, packed, sources, area, number % _SLOTS))
            while pending:  # also of a cancelled copy: when this returns, nothing live is read
                land()

    def _queue(
        self,
        batch: Batch,
        packed: torch.Tensor | None,
        sources: Sequence[StorageSource | None],
        area: torch.Tensor,
        slot: int,
    ) -> _Queued:
        parts = _parts(batch, sources) if packed is None else [packed]
        if len(batch.pieces) == 1:
            _target(batch, area).copy_(parts[0], non_blocking=True)
            return _Queued(batch, None, self._lane.record())
        assert self._bounce is not None, "taken in save()"
        here = slice(slot * BATCH_BYTES_MAX, slot * BATCH_BYTES_MAX + batch.nbytes)
        bounce = self._bounce[here]
        if packed is None and self._scratch is None:
            _one_by_one(parts, bounce)
            return _Queued(batch, bounce, self._lane.record())
        if packed is None:
            assert self._scratch is not None
            packed = self._scratch[here]
            torch.cat(parts, out=packed)
        bounce.copy_(packed, non_blocking=True)
        return _Queued(batch, bounce, self._lane.record())

    # -- memory --------------------------------------------------------------------------------------------------

    def _sections(self, batches: Sequence[Batch], together_bytes: int) -> list[_Section]:
        least = max(_SECTION_BYTES, -(-together_bytes // _SECTIONS_MAX))
        sections: list[_Section] = []
        group: list[tuple[Batch, int]] = []
        nbytes = 0
        for number, batch in enumerate(batches):
            group.append((batch, nbytes))
            nbytes += _aligned(batch.nbytes)
            if nbytes >= least or number == len(batches) - 1:
                section = _Section(self._lane.on_device(nbytes))
                section.batches = group
                sections.append(section)
                group, nbytes = [], 0
        return sections

    def _take_bounce(self) -> None:
        if self._bounce is None:
            self._bounce = self._lane.on_host(_SLOTS * BATCH_BYTES_MAX)

    def _take_scratch(self) -> None:
        nbytes = _SLOTS * BATCH_BYTES_MAX
        if self._scratch is None and self._room.has_beside(nbytes):
            with contextlib.suppress(torch.OutOfMemoryError):
                self._scratch = self._lane.on_device(nbytes)

    @contextlib.contextmanager
    def _drained_on_error(self) -> Iterator[None]:
        """After an error nothing that was queued writes to the host any more: the area is going to be used again."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a device that has failed writes nothing
                self._lane.record().synchronize()
            raise


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _parts(batch: Batch, sources: Sequence[StorageSource | None]) -> list[torch.Tensor]:
    """The live bytes of each piece."""
    parts = []
    for piece in batch.pieces:
        source = sources[piece.entry]
        assert source is not None, "what is on a device lies in a tensor"
        parts.append(source.bytes()[piece.entry_offset : piece.entry_offset + piece.nbytes])
    return parts


def _pack(parts: list[torch.Tensor], packed: torch.Tensor) -> None:
    if len(parts) == 1:
        packed.copy_(parts[0], non_blocking=True)  # by the device's own copy, not by a kernel
    else:
        torch.cat(parts, out=packed)


def _one_by_one(parts: Sequence[torch.Tensor], bounce: torch.Tensor) -> None:
    """Without any memory on the device."""
    at = 0
    for part in parts:
        bounce[at : at + part.numel()].copy_(part, non_blocking=True)
        at += part.numel()


def _target(batch: Batch, area: torch.Tensor) -> torch.Tensor:
    """Where the only piece of a batch goes."""
    (offset,) = batch.offsets
    return area[offset : offset + batch.nbytes]


def _scatter(batch: Batch, bounce: torch.Tensor, area: torch.Tensor) -> None:
    begins = itertools.accumulate(batch.sizes, initial=bounce.data_ptr())
    deque(map(ctypes.memmove, map(area.data_ptr().__add__, batch.offsets), begins, batch.sizes), maxlen=0)
