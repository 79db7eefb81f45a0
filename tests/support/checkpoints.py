"""Checkpoints made without holdfast's own writing path: images by torch.save or zipfile, manifests by simple code.

Nothing here uses holdfast/image/layout.py or holdfast/crc.py, so a bug in those cannot hide itself.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.image.manifest import EntryRecord, Manifest, State, TensorRecord, manifest_name, step_file_name
from tests.support.memory_store import MemoryStore

CHUNK_BYTES = 4096


def zip_image(entries: Mapping[str, bytes]) -> bytes:
    """A stored zip of these entries, as torch lays them out under `archive/`, but without torch."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return target.getvalue()


def torch_image(state: Mapping[str, Any]) -> bytes:
    """Return the bytes that torch.save writes."""
    import torch

    target = io.BytesIO()
    torch.save(dict(state), target)
    return target.getvalue()


def entry_records(image: bytes) -> list[EntryRecord]:
    """All zip entries, with the offset of their data read from the local headers."""
    records = []
    with zipfile.ZipFile(io.BytesIO(image)) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            name_bytes, extra_bytes = struct.unpack_from("<HH", image, info.header_offset + 26)
            offset = info.header_offset + 30 + name_bytes + extra_bytes
            records.append(
                EntryRecord(name=info.filename, offset=offset, nbytes=info.file_size, crc32=info.CRC)
            )
    return records


def manifest_of(
    image: bytes,
    *,
    step: int,
    attempt: int = 1,
    tensors: Mapping[str, str] | None = None,
    file: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    **changes: Any,
) -> Manifest:
    """The manifest of `image`.

    Args:
        image: The bytes of the file.
        step: Its step.
        attempt: Its attempt.
        tensors: Path of each tensor and the end of its entry's name, such as `data/0`.
        file: Name of the file; None for the plain one.
        chunk_bytes: Size of its chunks.
        changes: Other fields to set.
    """
    entries = entry_records(image)
    places = {
        path: next(i for i, e in enumerate(entries) if e.name.endswith(f"/{end}"))
        for path, end in (tensors or {}).items()
    }
    fields: dict[str, Any] = {
        "run": "run",
        "attempt": attempt,
        "step": step,
        "file": file or step_file_name(step),
        "state": State.VERIFIED,
        "image_bytes": len(image),
        "image_crc32": zlib.crc32(image),
        "chunk_bytes": chunk_bytes,
        "chunk_crc32s": tuple(
            zlib.crc32(image[at : at + chunk_bytes]) for at in range(0, len(image), chunk_bytes)
        ),
        "ranks": 2,
        "layout_digest": "0" * 64,
        "write_id": f"write-{attempt}-{step}",
        "created": "2025-01-02T03:04:05+00:00",
        "pgt1_seconds": 0.25,
        "pgt2_seconds": 0.5,
        "entries": tuple(entries),
        "tensors": tuple(
            TensorRecord(path=path, dtype="float32", shape=(entries[at].nbytes // 4,), entry=at)
            for path, at in places.items()
        ),
        "record": {"ranks": {"0": {"copy_seconds": 0.125, "sent_bytes": 2048}}},
    }
    return Manifest(**{**fields, **changes})


def small_image(seed: int = 1) -> bytes:
    """Tensors over several chunks: `data/0` of 10,000 bytes, `data/1` of 40, `data/2` of 6,000."""
    sizes = {"data/0": 10_000, "data/1": 40, "data/2": 6_000}
    tensors = {name: bytes((seed + i) * 31 % 251 for i in range(size)) for name, size in sizes.items()}
    return zip_image({"data.pkl": b"pickle" * 20, "byteorder": b"little", **tensors, "version": b"3\n"})


SMALL_TENSORS = {
    "model/weight": "data/0",
    "model/tied": "data/0",
    "model/bias": "data/1",
    "optimizer/moment": "data/2",
}


def add(store: MemoryStore, manifest: Manifest, image: bytes | None = None) -> Manifest:
    """Put manifest and file into a store in memory; without an image the file is missing."""
    if image is not None:
        store.objects[manifest.file] = image
    store.objects[manifest_name(manifest.file)] = manifest.to_bytes()
    return manifest


def add_small(store: MemoryStore, step: int, **changes: Any) -> Manifest:
    """A whole small checkpoint."""
    image = small_image(step)
    return add(store, manifest_of(image, step=step, tensors=SMALL_TENSORS, **changes), image)


def write_torch_run(
    directory: Path, steps: Mapping[int, Mapping[str, Any]], *, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """A run on disk: for each step a flat state of tensors, saved by torch, and its manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    for step, state in steps.items():
        image = torch_image(state)
        places = {path: f"data/{index}" for index, path in enumerate(state)}
        manifest = manifest_of(image, step=step, tensors=places, chunk_bytes=chunk_bytes)
        (directory / manifest.file).write_bytes(image)
        (directory / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())
