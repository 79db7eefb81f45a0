"""Finds the newest step that earlier attempts have logged, in the files of an offline W&B run.

    header, 7 bytes: ":W&B", magic, version
    blocks of 32 KiB, of pieces: CRC, length, kind ─► records: protocol buffers of wandb's own module

A killed process may leave the last record truncated; the records before it count.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import wandb

_log = logging.getLogger("holdfast.trainer")

_MAGIC, _HEADER_BYTES = b":W&B", 7
_BLOCK_BYTES = 32 << 10
_PIECE = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4


def newest_logged_step(run: wandb.Run) -> int:
    """Return the newest step of `run` in the folders of earlier attempts, next to its own; -1 without one."""
    own = Path(run.dir).parent
    newest = -1
    for file in own.parent.glob(f"*run-*/run-{run.id}.wandb"):
        if file.parent.resolve() != own.resolve():
            try:
                newest = max(newest, *_steps(file.read_bytes()), -1)
            except Exception as error:  # noqa: BLE001 - another version of W&B may write another format
                _log.warning(
                    "W&B: %s cannot be read, so steps in it may be logged twice: %s: %s",
                    file,
                    type(error).__name__,
                    error,
                )
    return newest


def _steps(data: bytes) -> Iterator[int]:
    from wandb.proto.wandb_internal_pb2 import Record

    for body in _records(data):
        record = Record.FromString(body)
        if record.WhichOneof("record_type") == "history":
            yield int(record.history.step.num)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a file."""
    if data[: len(_MAGIC)] != _MAGIC:
        return
    at, begun = _HEADER_BYTES, b""
    while at + _PIECE.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _PIECE.size:
            at += left
            continue
        _, nbytes, kind = _PIECE.unpack_from(data, at)
        at += _PIECE.size
        piece = data[at : at + nbytes]
        if kind == 0 or len(piece) < nbytes:
            return
        begun = piece if kind in (_WHOLE, _FIRST) else begun + piece
        at += nbytes
        if kind in (_WHOLE, _LAST):
            yield begun
