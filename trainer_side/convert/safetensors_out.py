"""Writes a checkpoint as one safetensors file, storage by storage, with one window of memory for each reader.

    names, dtypes, shapes ─► header ─► file of its full size
    each storage of the image ─► windows, CRC-32 checked ─► to where its tensors lie in the file

For a tensor that is not dense in its storage (a view with gaps, a transpose), the reader loads the whole storage, one
at a time. The library is not used, because it needs all tensors in memory at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.command.converters import ExportResult
from holdfast.command.output import progress_bar
from holdfast.command.place import write_atomically
from holdfast.errors import StateError
from holdfast.image.manifest import Manifest
from holdfast.store.base import Store
from holdfast.store.posix_io import write_all
from trainer_side.convert.contents import Contents, FlatTensor, bytes_of, dense
from trainer_side.convert.plain_values import encode
from trainer_side.convert.safetensors_in import (
    DTYPES,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    METADATA,
    VALUES,
    VALUES_FORMAT,
)
from trainer_side.state.position_names import to_rows

_READERS = 4
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class _TensorSlot:
    flat: FlatTensor
    begin: int
    end: int

    @property
    def is_dense(self) -> bool:
        """Whether the tensor's bytes lie in the storage as in the file."""
        tensor = self.flat.tensor
        return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class SafetensorsPlan:
    """The header of the file and the places of its tensors, none of which is read yet.

    `only`: Name of the part of the state in `contents`. StateError: the format cannot hold a dtype or a value.
    """

    def __init__(self, contents: Contents, *, only: str | None) -> None:
        self._contents = contents
        self.tensors = contents.flat_tensors()
        _refuse_dtypes(self.tensors)
        self._slots: list[_TensorSlot] = []
        end = 0
        # As in the library: tensors with the greatest alignment come first, so that none needs padding.
        for flat in sorted(self.tensors, key=lambda one: (-one.tensor.itemsize, one.name)):
            begin, end = end, end + flat.tensor.numel() * flat.tensor.itemsize
            self._slots.append(_TensorSlot(flat, begin, end))
        self._header = self._make_header(only)
        self.nbytes = len(self._header) + end

    @property
    def tied(self) -> dict[str, str]:
        """Tied tensors: name → name of the first. In the file each has its own bytes."""
        return {flat.name: flat.tied_to for flat in self.tensors if flat.tied_to}

    @property
    def read_bytes(self) -> int:
        return sum(self._contents.nbytes(entry) for entry in self._by_entry())

    def write(self, fd: int, advance: Callable[[int], None]) -> None:
        """Write the whole file to an empty one. Blocks. `advance`: Called with bytes newly read, from any thread.

        DamageError: bytes are damaged; names the tensors. StoreError: the store failed. Raises OSError.
        """
        os.truncate(fd, self.nbytes)
        write_all(fd, memoryview(self._header), 0)
        # The largest first, so that no reader is left with a large one at the end.
        jobs = sorted(self._by_entry().items(), key=lambda job: -self._contents.nbytes(job[0]))
        with ThreadPoolExecutor(_READERS, thread_name_prefix="export") as readers:
            futures = [readers.submit(self._write_entry, fd, *job, advance) for job in jobs]
            try:
                for future in futures:
                    future.result()
            finally:
                readers.shutdown(cancel_futures=True)

    def _by_entry(self) -> dict[int, list[_TensorSlot]]:
        found: dict[int, list[_TensorSlot]] = {}
        for slot in self._slots:
            entry = self._contents.entry(slot.flat.tensor)
            if entry is not None and slot.end > slot.begin:
                found.setdefault(entry, []).append(slot)
        return found

    def _write_entry(
        self, fd: int, entry: int, slots: Sequence[_TensorSlot], advance: Callable[[int], None]
    ) -> None:
        base = len(self._header)
        if all(slot.is_dense for slot in slots):

            def write_part(offset: int, part: memoryview) -> None:
                for slot in slots:
                    start = int(slot.flat.tensor.storage_offset()) * slot.flat.tensor.itemsize
                    first = max(offset, start)
                    last = min(offset + len(part), start + slot.end - slot.begin)
                    if first < last:
                        write_all(fd, part[first - offset : last - offset], base + slot.begin + first - start)

            self._contents.stream(entry, write_part)
        else:
            storage = self._contents.load(entry)
            for slot in slots:
                contiguous = dense(slot.flat.tensor, storage)
                write_all(fd, bytes_of(contiguous.data_ptr(), slot.end - slot.begin), base + slot.begin)
        advance(self._contents.nbytes(entry))

    def _make_header(self, only: str | None) -> bytes:
        manifest = self._contents.manifest
        names = {flat.path: flat.name for flat in self.tensors}
        values = {
            "format": VALUES_FORMAT,
            "run": manifest.run,
            "step": manifest.step,
            "attempt": manifest.attempt,
            "only": only,
            "tied": self.tied,
            "names": to_rows(self._contents.names),
            "state": encode(self._contents.tree, names),
        }
        document: dict[str, Any] = {METADATA: {"format": "pt", VALUES: json.dumps(values, allow_nan=False)}}
        for slot in self._slots:
            document[slot.flat.name] = {
                "dtype": _NAMES[slot.flat.tensor.dtype],
                "shape": list(slot.flat.tensor.shape),
                "data_offsets": [slot.begin, slot.end],
            }
        text = json.dumps(document, separators=(",", ":")).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)
        if len(text) > HEADER_BYTES_MAX:
            raise StateError(
                f"names and values take {len(text)} bytes, a safetensors file has room for {HEADER_BYTES_MAX} bytes "
                "of them; export with --to dcp or torch, or a part with --only"
            )
        return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _refuse_dtypes(tensors: Sequence[FlatTensor]) -> None:
    wrong = [f"{flat.path} ({flat.tensor.dtype})" for flat in tensors if flat.tensor.dtype not in _NAMES]
    if METADATA in {flat.name for flat in tensors}:
        wrong.append(f"the name {METADATA}, which is taken")
    if wrong:
        more = f" and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
        raise StateError(
            f"a safetensors file cannot hold {', '.join(wrong[:_NAMES_SHOWN])}{more}; export with --to dcp or torch, "
            "or another part with --only"
        )


def write_safetensors(
    store: Store, manifest: Manifest, path: Path, *, only: str | None, quiet: bool
) -> ExportResult:
    """Write the file at `path`, whole or not at all; for `holdfast export`.

    `only`: A name at the top of the state: export only the tree under it. DamageError: bytes are damaged; names the
    tensors. StateError: the format cannot hold a dtype or a value. StoreError: the store or the file failed.
    """
    plan = SafetensorsPlan(Contents(store, manifest, only=only), only=only)
    with progress_bar(path.name, plan.read_bytes, hidden=quiet) as advance:
        write_atomically(path, plan.nbytes, lambda fd: plan.write(fd, advance))
    return ExportResult(plan.nbytes, len(plan.tensors), plan.tied)
