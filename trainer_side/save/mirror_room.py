"""Whether the device has room for a mirror: a second copy of this rank's slice, for the time of one copy to the host.

    free = what nobody holds + what torch keeps for later
    room = free − (the most that training ever held − what it holds now) − a tenth of the device

What a step of training takes is known only after one, so the first save has no room. What training held at most is
taken without the mirrors of before. Where torch had to give memory back to the device while there was a mirror, memory
is short, and no mirror is made any more.
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
        self._training_bytes = 0  # that training held at most
        self._retries = 0
        self._mirror_bytes = 0  # of the mirror since the save before
        self._saves = 0
        self._is_short = False
        self._said: bool | None = None

    def has(self, nbytes: int, memory: DeviceMemory | None) -> bool:
        """Whether a mirror of `nbytes` may be made at this save."""
        if self._limit_bytes is not None:
            return self._say(nbytes <= self._limit_bytes, nbytes, self._limit_bytes)
        if memory is None:
            return False
        self._saves += 1
        self._training_bytes = max(self._training_bytes, memory.peak - self._mirror_bytes)
        if self._mirror_bytes and memory.retries > self._retries:
            self._is_short = True
        self._mirror_bytes, self._retries = 0, memory.retries
        if self._saves == 1:
            return False
        to_come = max(0, self._training_bytes - memory.allocated)
        room = 0 if self._is_short else max(0, memory.free - to_come - memory.total // _SPARE_SHARE)
        return self._say(nbytes <= room, nbytes, room)

    def made(self, nbytes: int) -> None:
        """There is a mirror now."""
        self._mirror_bytes = nbytes

    def refused(self) -> None:
        """The device had no memory for it after all."""
        self._is_short = self._limit_bytes is None
        self._say(False, 0, 0)

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
