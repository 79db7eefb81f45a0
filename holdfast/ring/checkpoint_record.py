"""The file beside a ring that tracks one checkpoint in it. The stager replaces it whole; any process reads it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.ring.side_files import read_side_file
from holdfast.sealed import seal, unseal

_NAME = re.compile(r"checkpoint-(\d{1,19})-(\d{1,19})\.json")
_CRC_FIELD = "checkpoint_crc32"


class CheckpointRecord(BaseModel):
    """The record of one checkpoint while it is in the ring."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    version: Literal[2] = 2
    attempt: Annotated[int, Field(ge=1, lt=2**62)]
    step: Annotated[int, Field(ge=0, lt=2**62)]
    state: Literal["receiving", "staged"]  # staged: all slices are in the ring
    layout_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # of the layout that lies beside it
    # Times and bytes of the phases so far: {"ranks": {"0": {"saved_at_unix": ...}}, "stager": {...}}
    record: dict[str, Any] = Field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return seal(self.model_dump_json().encode(), _CRC_FIELD)


def checkpoint_path(directory: Path, attempt: int, step: int) -> Path:
    return directory / f"checkpoint-{attempt}-{step}.json"


def checkpoint_ids(directory: Path) -> list[CheckpointId]:
    """Return the ids of all checkpoint files beside a ring, oldest first; [] if the directory is gone."""
    with contextlib.suppress(FileNotFoundError):
        found = (_NAME.fullmatch(path.name) for path in directory.iterdir())
        return sorted(CheckpointId(int(match[1]), int(match[2])) for match in found if match)
    return []


def read_checkpoint(directory: Path, attempt: int, step: int) -> CheckpointRecord | None:
    """Read the record of one checkpoint beside a ring; None: no file. Raises `ProtocolError` if it is damaged."""
    path = checkpoint_path(directory, attempt, step)
    try:
        data = read_side_file(path)
    except FileNotFoundError:
        return None
    body = unseal(data, _CRC_FIELD)
    if body is None:
        raise ProtocolError(
            f"{path}: its CRC-32 is wrong; the file was damaged in memory, or another version has written it"
        )
    try:
        found = CheckpointRecord.model_validate_json(body)
    except (ValidationError, RecursionError) as error:
        raise ProtocolError(f"{path}: the file is not a checkpoint record: {error}") from error
    if (found.attempt, found.step) != (attempt, step):
        raise ProtocolError(
            f"{path}: the record names attempt {found.attempt}, step {found.step}, which its file name does not"
        )
    return found
