"""Records of objects that the run's writer is about to name or remove: after its death only these may be removed.

    publish   intent ─► file ─► manifest ─► intent removed
    remove    intent ─► manifest removed ─► file removed ─► intent removed
    clear     the next writer, for each intent of an earlier attempt:
                  a manifest has the name ─► remove only the intent; keep an intent to remove
                  no manifest, and the file is that very write ─► remove the file, then the intent

A file without an intent is not a leftover: a person put it there, or restored it from a backup. A late writer's intents
are its own, since their names hold its write-id.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.checkpoints.publish import exists, writer_attempt
from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.image.manifest import Manifest, manifest_name
from holdfast.sealed import seal, unseal
from holdfast.store.base import InterruptedUpload, ObjectInfo, Store, Upload

_log = logging.getLogger("holdfast.intents")

_PREFIX = ".holdfast/intent-"
_WRITE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_NAME = re.compile(rf"\.holdfast/intent-({_WRITE_ID.pattern})\.json")
_CRC_FIELD = "intent_crc32"
_BYTES_MAX = 1 << 16  # an intent is input from outside
_Text = Annotated[str, Field(min_length=1, max_length=4096)]
_Size = Annotated[int, Field(gt=0, lt=2**62)]


class Intent(BaseModel):
    """One file that is about to get or lose its name. `token`: the upload's, which tells this write from any other."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format: Literal["holdfast-intent/1"] = "holdfast-intent/1"
    act: Literal["publish", "remove"]
    file: Annotated[str, Field(pattern=r"^step-\d{9,19}(-a\d{3,19})?\.pt$")]
    write_id: _Text
    nbytes: _Size
    chunk_bytes: _Size
    part_bytes: Annotated[int, Field(ge=0, lt=2**62)] = 0
    token: Annotated[str, Field(max_length=4096)] = ""

    @classmethod
    def to_publish(cls, file: str, upload: Upload, *, nbytes: int, chunk_bytes: int, write_id: str) -> Self:
        return cls(
            act="publish",
            file=file,
            write_id=write_id,
            nbytes=nbytes,
            chunk_bytes=chunk_bytes,
            part_bytes=upload.part_bytes,
            token=upload.token or "",
        )

    @classmethod
    def to_remove(cls, manifest: Manifest) -> Self:
        return cls(
            act="remove",
            file=manifest.file,
            write_id=manifest.write_id,
            nbytes=manifest.image_bytes,
            chunk_bytes=manifest.chunk_bytes,
        )

    @property
    def name(self) -> str:
        return intent_name(self.write_id)

    def write(self, store: Store) -> None:
        """Write the record. Raises `StoreError`."""
        store.write(self.name, seal(self.model_dump_json().encode(), _CRC_FIELD))


def intent_name(write_id: str) -> str:
    """Return the name of the intent of a write. The write-id may come from outside, in a manifest."""
    if not _WRITE_ID.fullmatch(write_id):
        write_id = sha256(write_id.encode(errors="replace")).hexdigest()
    return f"{_PREFIX}{write_id}.json"


def discard_intent(store: Store, write_id: str) -> None:
    """Remove the intent of a finished write. If the store fails, that is logged, and the next writer removes it."""
    try:
        store.delete(intent_name(write_id))
    except StoreError as error:
        _log.warning("%s stays for the next writer: %s", intent_name(write_id), error)


def clear_intents(
    store: Store,
    before_attempt: int,
    is_wanted: Callable[[str], bool],
    *,
    objects: Sequence[ObjectInfo] | None = None,
) -> list[str]:
    """Remove what earlier writers left half done, and their intents; return the removed files. Only for the run's one
    writer. Intents of `before_attempt` or later stay, and those whose write-id `is_wanted`, because their upload is
    resumed. Raises `StoreError`; may be called again.
    """
    removed: list[str] = []
    for info in store.list() if objects is None else objects:
        match = _NAME.fullmatch(info.name)
        if match is None or is_wanted(match[1]) or writer_attempt(match[1]) >= before_attempt:
            continue
        file = undo_intent(store, match[1])
        removed += [file] if file else []
    return removed


def undo_intent(store: Store, write_id: str) -> str:
    """Remove the file of this write if it exists unlisted, and the intent; return the file's name, or ""."""
    intent = _read(store, intent_name(write_id))
    if intent is None:
        return ""
    is_listed = exists(store, manifest_name(intent.file))  # a manifest of this write or another, whole or not
    if is_listed and intent.act == "remove":
        return ""  # its writer may only be suspended, and would leave a file without an intent
    removes = not is_listed and _matches_intent(store, intent)
    if removes:
        store.delete(intent.file)
    store.delete(intent.name)
    return intent.file if removes else ""


def _read(store: Store, name: str) -> Intent | None:
    """Return the intent of this name; None if it is gone, or cannot be trusted: then it stays, too."""
    try:
        body = unseal(store.read(name, _BYTES_MAX), _CRC_FIELD)
        intent = None if body is None else Intent.model_validate_json(body)
    except StoreMissing:
        return None
    except DamageError as error:
        _log.warning("no intent of holdfast, left as it is: %s", error)
        return None
    except (ValidationError, RecursionError):
        intent = None
    if intent is None or intent.name != name:
        _log.warning("%s/%s: is no intent that this version reads; left as it is", store.url, name)
        return None
    return intent


def _matches_intent(store: Store, intent: Intent) -> bool:
    """Whether the file at this name is the one that this intent records."""
    try:
        if store.size(intent.file) != intent.nbytes:
            return False
        if not intent.token:
            return True  # a removal that had begun, or a store that cannot tell one write from another
        interrupted = InterruptedUpload(intent.nbytes, intent.part_bytes, intent.write_id, intent.token)
        upload = store.resume(intent.file, interrupted)
    except (StoreMissing, DamageError):
        return False
    return upload.published
