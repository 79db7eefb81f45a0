"""Hostile portable files: real ones with changes, pickles that try to run code, and absurd sizes.

Each has a manifest whose CRCs are true for it: an attacker who may write to the store can make both.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.image.manifest import EntryRecord, Manifest
from tests.support.checkpoints import entry_records, manifest_of
from tests.support.memory_store import MemoryStore
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import Restored, RestoreOptions

__all__ = ["SEED", "file_with_pickle", "live_state", "manifest_for", "put", "restore_bytes", "torch_pickle"]


def _saved(tree: Any) -> bytes:
    out = io.BytesIO()
    torch.save(tree, out)
    return out.getvalue()


SEED = _saved({"weight": torch.arange(300.0), "tied": torch.ones(3), "step": 3})
"""A real file that fits `live_state`."""


def live_state() -> dict[str, Any]:
    """The state that the file is restored into."""
    return {"weight": torch.zeros(300), "tied": torch.zeros(3), "step": 0}


def torch_pickle(tree: Any) -> bytes:
    """The data.pkl of a file written by torch."""
    with zipfile.ZipFile(io.BytesIO(_saved(tree))) as archive:
        return archive.read("archive/data.pkl")


def file_with_pickle(pickled: bytes, storages: Mapping[str, bytes] | None = None) -> bytes:
    """A file in torch's layout, with any bytes as its pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", b"3\n")
    return out.getvalue()


def manifest_for(image: bytes, **changes: Any) -> Manifest:
    """A manifest that matches the bytes of `image`; with entries of the seed if `image` is not a zip file."""
    try:
        return manifest_of(image, step=7, **changes)
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, IndexError, OSError, KeyError):
        pass
    entries: list[EntryRecord] = []
    for entry in entry_records(SEED):
        data = image[entry.offset : entry.offset + entry.nbytes]
        if len(data) == entry.nbytes:
            entries.append(entry.model_copy(update={"crc32": zlib.crc32(data)}))
    whole = manifest_of(SEED, step=7, **changes)
    chunk_bytes = whole.chunk_bytes
    return whole.model_copy(
        update={
            "image_bytes": len(image),
            "image_crc32": zlib.crc32(image),
            "chunk_crc32s": tuple(
                zlib.crc32(image[at : at + chunk_bytes]) for at in range(0, len(image), chunk_bytes)
            ),
            "entries": tuple(entries),
        }
    )


def put(store: MemoryStore, image: bytes, **changes: Any) -> Manifest:
    """Publish a file with its manifest."""
    made = manifest_for(image, **changes)
    store.objects[made.file] = image
    store.objects[made.file.removesuffix(".pt") + ".json"] = made.to_bytes()
    return made


def restore_bytes(image: bytes, state: dict[str, Any] | None = None) -> Restored | None:
    """Restore as a job would; raises the same errors."""
    if not image:
        return None
    store = MemoryStore()
    put(store, image)
    return restore(
        live_state() if state is None else state,
        store,
        LonePeers(),
        events=None,
        options=RestoreOptions(threads=1),
    )
