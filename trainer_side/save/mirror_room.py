"""Whether the device has room for a mirror: a second copy of this rank's slice, for the time of one copy to the host.

    room = what torch may have − the most that torch ever held for training − a tenth of the device

torch may have what nobody holds and what it holds itself. What it keeps for training, in use or not, is training's,
also the private memory of graphs. What copies have taken is kept by torch, too, and is not training's; it is told apart
by when the peak was reached. What a step takes is known only after one, so the first save has no room. Where torch had
to give memory back to the device while a copy was under way, memory is short, and no mirror is made any more. What else
a save takes of the device has to fit into the same room: a mirror of what anything may change, where there is none of
all, and the memory that small tensors are packed in.
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
        self._peak_bytes = self._returned_bytes = self._retries = 0  # at the save before
        self._lent_bytes = 0  # since then
        self._is_crowded = False  # torch had to give memory back while that copy was under way
        self._spare_bytes = self._free_bytes = 0  # at this save
        self._saves = 0
        self._is_short = False
        self._said: bool | None = None

    def has(self, nbytes: int, memory: DeviceMemory | None) -> bool:
        """Whether a mirror of `nbytes` may be made at this save."""
        if memory is not None:
            self._measure(memory)
        if self._limit_bytes is not None:
            room = self._limit_bytes if memory is None else min(self._limit_bytes, self._free_bytes)
            return self._say(nbytes <= room, nbytes, room)
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
            self.lent(nbytes)
            self._spare_bytes -= nbytes
        return fits

    def lent(self, nbytes: int) -> None:
        """So much is taken for this copy."""
        self._lent_bytes += nbytes

    def over(self, memory: DeviceMemory | None) -> None:
        """The copy has ended, and has given back what it took. Copy thread; the next save comes after it."""
        self._is_crowded = memory is not None and memory.retries > self._retries

    def refused(self) -> None:
        """The device had no memory for it after all."""
        self._is_short = self._limit_bytes is None
        self._spare_bytes = 0
        self._say(False, 0, 0)

    def _measure(self, memory: DeviceMemory) -> None:
        self._saves += 1
        # Where torch has given nothing back, it holds what was lent: that is not training's.
        kept_bytes = self._lent_bytes if memory.returned == self._returned_bytes else 0
        if memory.peak != self._peak_bytes:
            self._training_bytes = max(self._training_bytes, memory.peak - kept_bytes)
        self._is_short = self._is_short or self._is_crowded
        self._peak_bytes, self._returned_bytes = memory.peak, memory.returned
        self._retries, self._lent_bytes, self._is_crowded = memory.retries, 0, False
        self._free_bytes = memory.free + kept_bytes
        spare = memory.total // _SPARE_SHARE
        room = max(0, memory.free + memory.reserved - self._training_bytes - spare)
        self._spare_bytes = 0 if self._is_short or self._saves == 1 else min(room, self._free_bytes)

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
