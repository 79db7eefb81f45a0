"""Whether the device has room for a mirror: a second copy of this rank's slice, for the time of one copy to the host.

    free = what nobody holds + what torch keeps for later
    room = free − (the most that training ever held − what it holds now) − a tenth of the device

What a step of training takes is known only after one, so the first save has no room. What training held at most is
taken without the mirrors of before. Where torch had to give memory back to the device while there was a mirror, memory
is short, and no mirror is made any more. What a copy without a mirror takes meanwhile has to fit into the same room.
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
        self._has_lent = False  # since then, whatever it was
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

    def has_beside(self, nbytes: int) -> bool:
        """Whether a copy without a mirror may take so much meanwhile; after `has`, and whatever the limit is."""
        fits = nbytes <= self._spare_bytes
        self._has_lent |= fits
        return fits

    def made(self, nbytes: int) -> None:
        """There is a mirror now."""
        self._mirror_bytes, self._has_lent = nbytes, True

    def refused(self) -> None:
        """The device had no memory for it after all."""
        self._is_short = self._limit_bytes is None
        self._spare_bytes = 0
        self._say(False, 0, 0)

    def _measure(self, memory: DeviceMemory) -> None:
        self._saves += 1
        self._training_bytes = max(self._training_bytes, memory.peak - self._mirror_bytes)
        if self._has_lent and memory.retries > self._retries:
            self._is_short = True
        self._mirror_bytes, self._has_lent, self._retries = 0, False, memory.retries
        to_come = max(0, self._training_bytes - memory.allocated)
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
