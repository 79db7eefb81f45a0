"""The samples of many tensors on one device, gathered by a few launches, however many tensors there are.

    live tensors    ··row·······row···· · ···row·····tail        rows of 64 bytes, wherever they lie on the device
    gathered        row│row│row│tail                             one table, brought over in one copy

Where the rows of each tensor lie is known as long as no tensor moves, but for the first one, which the step draws: that
is added on the device. The tensors are read by address (`DeviceLane.span`), so nothing that training has replaced is
kept alive. Of a tensor whose size is no multiple of a row, the row that ends with it is brought, too: its last bytes
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from holdfast.crc import crc32
from holdfast.image.replicas import ROW_BYTES, first_row, stride
from trainer_side.state.accelerator import StreamEvent, brought
from trainer_side.state.survey import StorageSource

if TYPE_CHECKING:
    import numpy.typing as npt

    _Numbers = npt.NDArray[np.int64]

Span = Callable[[int, int], torch.Tensor | None]  # bytes of the device, from an address on


class _Plan(NamedTuple):
    """The rows of some tensors. Of each tensor: its rows in the table, and what it has beyond whole rows.

    Attributes:
        apart: Every so-many-th row is looked at. `rows`: so many at most; there is one less where the step draws a
            first one after `last_first`.
        begins: The place of the first of them in the table. `tails`: the place of the row with the rest.
        rest_at: Where the rest begins in that row. `rest_bytes`: its size; 0: there is none.
    """

    apart: _Numbers
    rows: _Numbers
    last_first: _Numbers
    begins: _Numbers
    tails: _Numbers
    rest_at: _Numbers
    rest_bytes: _Numbers

    @classmethod
    def of(cls, addresses: _Numbers, sizes: _Numbers) -> _Plan:
        whole, rest = np.divmod(sizes, ROW_BYTES)
        apart = np.array([*map(stride, sizes.tolist())], np.int64)
        rows = -(-whole // apart)
        ends = np.cumsum(rows)
        has_rest = (rest > 0).astype(np.int64)
        tails = rows.sum() + np.cumsum(has_rest) - has_rest
        rest_at = np.where(whole > 0, ROW_BYTES - rest, addresses % ROW_BYTES)
        return cls(apart, rows, whole - 1 - (rows - 1) * apart, ends - rows, tails, rest_at, rest)


class DeviceRows(NamedTuple):
    """Rows on their way from a device."""

    entries: list[int]
    plan: _Plan
    step: int
    memory: torch.Tensor
    arrived: StreamEvent | None

    def crcs(self) -> Iterator[tuple[int, int]]:
        """Entry and CRC. Copy thread; waits for what is still on its way."""
        if self.arrived is not None:
            self.arrived.synchronize()
        memory, plan = self.memory.view(-1).numpy().data, self.plan
        counts = plan.rows - (_firsts(plan.apart, self.step) > plan.last_first)
        begins, ends = plan.begins * ROW_BYTES, (plan.begins + np.maximum(counts, 0)) * ROW_BYTES
        rests = plan.tails * ROW_BYTES + plan.rest_at
        columns = (begins, ends, rests, rests + plan.rest_bytes)
        for entry, begin, end, rest, rest_end in zip(
            self.entries, *(column.tolist() for column in columns), strict=True
        ):
            found = crc32(memory[begin:end])
            yield entry, crc32(memory[rest:rest_end], found) if rest < rest_end else found


class DeviceSamples:
    """Gathers the samples of a plan's tensors on one device. Training thread.

    Args:
        device: It.
        span: Its memory by address.
    """

    def __init__(self, device: torch.device, span: Span) -> None:
        self._device, self._span = device, span
        self._places: list[tuple[int, int]] = []
        self._plan: _Plan | None = None
        self._groups: list[tuple[int, int]] = []  # rows apart, and the last row that may be the first one
        self._rows = self._index = self._group = torch.empty(0)

    def gather(self, sources: Sequence[StorageSource], step: int) -> DeviceRows | None:
        """Queue the samples on the current stream; None: they must be taken one by one."""
        filled = [source for source in sources if source.nbytes]
        places = [(source.data_ptr, source.nbytes) for source in filled]
        if places != self._places:
            self._places = places
            self._plan = self._lay_out(*np.array(places, np.int64).T) if places else None
        if self._plan is None:
            return None
        firsts = torch.empty(len(self._groups), dtype=torch.int64, pin_memory=self._device.type != "cpu")
        drawn = [min(first_row(step, apart), last) * ROW_BYTES for apart, last in self._groups]
        firsts.numpy()[:] = drawn
        index = firsts.to(self._device, non_blocking=True).index_select(0, self._group)
        rows = self._rows.index_select(0, index.add_(self._index))
        return DeviceRows([source.entry for source in filled], self._plan, step, *brought(rows))

    def _lay_out(self, addresses: _Numbers, sizes: _Numbers) -> _Plan | None:
        """Find the rows; None: there are no tensors by address, or one that is smaller than a row lies across two."""
        plan = _Plan.of(addresses, sizes)
        is_small = sizes < ROW_BYTES
        if (addresses[is_small] % ROW_BYTES + sizes[is_small] > ROW_BYTES).any():
            return None  # a row around it might reach into memory that is nobody's
        begin = int(addresses.min()) // ROW_BYTES * ROW_BYTES
        nbytes = -(-(int((addresses + sizes).max()) - begin) // ROW_BYTES) * ROW_BYTES
        memory = self._span(begin, nbytes)
        if memory is None:
            return None
        self._rows = memory.as_strided((nbytes - ROW_BYTES + 1, ROW_BYTES), (1, 1))
        of_row = np.repeat(np.arange(len(sizes)), plan.rows)
        number = np.arange(len(of_row)) - plan.begins[of_row]
        apart = plan.apart[of_row]
        is_last = number == plan.rows[of_row] - 1
        # The last one might be drawn beyond the tensor: then it is another one, and nobody looks at it.
        last_first = np.where(is_last, plan.last_first[of_row], apart - 1)
        rests = np.flatnonzero(plan.rest_bytes)
        ends = np.where(is_small, addresses // ROW_BYTES * ROW_BYTES, addresses + sizes - ROW_BYTES)[rests]
        index = np.concatenate([addresses[of_row] + number * apart * ROW_BYTES, ends]) - begin
        keys = np.stack([apart, last_first], axis=1)
        groups, group = np.unique(
            np.concatenate([keys, np.tile([1, 0], (len(rests), 1))]), axis=0, return_inverse=True
        )
        self._groups = [(one, last) for one, last in groups.tolist()]
        self._index = self._there(index)
        self._group = self._there(group.reshape(-1).astype(np.int32))
        return plan

    def _there(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        here = torch.from_numpy(numbers)
        if self._device.type == "cpu":
            return here
        return here.pin_memory().to(self._device, non_blocking=True)


def _firsts(apart: _Numbers, step: int) -> _Numbers:
    """Of each tensor the row that the step draws."""
    values, places = np.unique(apart, return_inverse=True)
    return np.array([first_row(step, one) for one in values.tolist()], np.int64)[places.reshape(-1)]
