"""Whether the device has room for a mirror: a second copy of this rank's slice, for the time of one copy to the host.

    room = what nobody holds − (the most that torch ever held for training − what it holds now) − a tenth of the device

What torch keeps for training, in use or not, is training's: also the private memory of graphs. What a step takes is
known only after one, so the first save has no room. Where torch had to give memory back to the device while there was a
mirror, memory is short, and no mirror is made any more. What else a save takes of the device has to fit into the same
room: a mirror of what anything may change, where there is none of all, and what small tensors are gathered in.
"""

from __future__ import annotations

import logging

from trainer_side.save.device_lane import DeviceMemory

_log = logging.getLogger("holdfast.trainer")
_SPARE_SHARE = 10  # a tenth of the device's memory is left alone


class MirrorRoom:
    """The room for mirrors on one device. Training thread.

    Args:
        limit_bytes: Most bytes of a mirror, from the first save on; None: what is measured.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._training_bytes = 0  # that torch held for training at most
        self._retries = 0
        self._has_lent = False  # since the save before
        self._spare_bytes = 0  # at this save
        self._saves = 0
        self._is_short = False
        self._said: bool | None = None

    def has(self, nbytes: int, memory: DeviceMemory | None) -> bool:
        """Whether a mirror of `nbytes` may be made at this save."""
        if memory is not None:
            self._measure(memory)
        if self._limit_bytes is not None:
            return self._say(nbytes <= self._limit_bytes, nbytes, self._limit_bytes)
        if self._saves < 2:
            return False
        return self._say(nbytes <= self._spare_bytes, nbytes, self._spare_bytes)

    def has_in_part(self, nbytes: int) -> bool:
        """Whether there may be a mirror of a part, where there is none of all; after `has`."""
        return (self._limit_bytes is None or nbytes <= self._limit_bytes) and self.has_beside(nbytes)

    def has_beside(self, nbytes: int) -> bool:
        """Whether so much may be taken where there is no mirror of all, whatever the limit is; it counts as taken."""
        fits = nbytes <= self._spare_bytes
        if fits:
            self._has_lent, self._spare_bytes = True, self._spare_bytes - nbytes
        return fits

    def made(self) -> None:
        """There is a mirror now."""
        self._has_lent = True

    def refused(self) -> None:
        """The device had no memory for it after all."""
        self._is_short = self._limit_bytes is None
        self._spare_bytes = 0
        self._say(False, 0, 0)

    def _measure(self, memory: DeviceMemory) -> None:
        self._saves += 1
        self._training_bytes = max(self._training_bytes, memory.peak)
        if self._has_lent and memory.retries > self._retries:
            self._is_short = True
        self._has_lent, self._retries = False, memory.retries
        to_come = max(0, self._training_bytes - memory.reserved)
        room = max(0, memory.free - to_come - memory.total // _SPARE_SHARE)
        self._spare_bytes = 0 if self._is_short or self._saves == 1 else room

    def _say(self, fits: bool, nbytes: int, room: int) -> bool:
        """Once, and again when it is otherwise."""
        if fits is not self._said:
            self._said = fits
            if fits:
                _log.info(
                    "checkpoints are copied on the device first, %d bytes: updates wait for nothing", nbytes
                )
            else:
                _log.info(
                    "no room on the device for a copy of %d bytes, there are %d to spare: updates wait for the copy to "
                    "the host",
                    nbytes,
                    room,
                )
        return fits
