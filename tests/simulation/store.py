"""A store that keeps the promises of `holdfast.store.base`, and misbehaves in every way that these allow.

    StoreState (survives every process)          StoreClient (one per process)
      objects: visible, whole                      before each call: others run, it may fail, the process may die
      uploads: parts of open ones                  after each call: others run, answers get lost, the process may die

Three kinds: `parts` checks each part's CRC-32 and lists parts (S3), `file` checks nothing and has no parts (POSIX),
`opaque` cannot be resumed.
"""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.store.base import SMALL_BYTES_MAX, InterruptedUpload, ObjectInfo, reject_oversized
from holdfast.store.names import Keep, is_kept
from tests.simulation.scheduler import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["OpenUpload", "StoreClient", "StoreState"]

_T = TypeVar("_T")
URL = "sim://bucket/run"


@dataclass
class OpenUpload:
    """Parts of an upload that is not published."""

    name: str
    write_id: str
    nbytes: int
    part_bytes: int
    parts: dict[int, bytes] = field(default_factory=dict)


class StoreState:
    """The contents of the store, which outlive every process.

    Attributes:
        kind: `parts`, `file` or `opaque`.
        full: Why writes fail now, such as a full disk; empty when all is well.
        fail_share: Share of calls that fail with a transient error; half of these have taken effect.
        version: Changes with every change.
        took_at: When it last accepted a part of an upload, and acknowledged it.
    """

    def __init__(self, kind: str, part_chunks: int) -> None:
        self.kind, self.part_chunks = kind, part_chunks
        self.objects: dict[str, bytes] = {}
        self.owners: dict[str, str] = {}  # name → write-id of the upload that was published there
        self.uploads: dict[str, OpenUpload] = {}
        self.full = ""
        self.fail_share = 0.0
        self.slow_seconds = 0.0
        self.version = 0
        self.begun = 0
        self.calls = 0
        self.took_at = -1e9


class StoreClient:
    """As `holdfast.store.base.Store`, for one process."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self.state: StoreState = world.store
        self.url = URL

    def act(self, what: str, name: str, call: Callable[[], _T], *, writes: bool = False) -> _T:
        """Do one operation; before or after it the process may die and the store may fail."""
        world, state, sim = self._world, self.state, self._world.scheduler
        chance = sim.chance
        state.calls += 1
        place = f"store.{what}"
        sim.check_alive()
        draw = chance.random()
        if draw < 0.1 or state.slow_seconds:
            sim.wait(None, chance.random() * (0.05 + state.slow_seconds), place)
        elif draw < 0.75 or writes:
            sim.step(place)
        if state.full and what in {"write", "create", "begin", "write_part", "publish"}:
            raise StoreError(f"{URL}/{name}: {what}: {state.full}")
        fails = state.fail_share > 0 and chance.random() < state.fail_share
        lost = fails and writes and chance.random() < 0.5
        if fails and not lost:
            raise StoreError(f"{URL}/{name}: {what}: connection reset", retriable=True)
        world.store_act(self._process, what, name)
        world.before_act(self._process, what, name)
        result = call()
        if writes:
            state.version += 1
            sim.step(place + ".done")
        if lost:
            raise StoreError(f"{URL}/{name}: {what}: the answer was lost", retriable=True)
        if what == "write_part":
            state.took_at = sim.now
        return result

    request_bytes = 16 << 20

    # -- small objects -------------------------------------------------------------------------------------------

    def check(self, *, write: bool) -> None:
        self.act("check", "", lambda: None)

    def close(self) -> None: ...

    def list(self) -> builtins.list[ObjectInfo]:
        objects = self.state.objects
        return self.act(
            "list", "", lambda: [ObjectInfo(name, len(data)) for name, data in sorted(objects.items())]
        )

    def size(self, name: str) -> int:
        return self.act("size", name, lambda: len(self._get(name)))

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        def get() -> bytes:
            data = self._get(name)
            reject_oversized(f"{URL}/{name}", len(data), bytes_max)
            return data

        return self.act("read", name, get)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        def fill() -> None:
            data = self._get(name)[offset : offset + len(buffer)]
            if len(data) < len(buffer):
                raise DamageError(f"{URL}/{name}: ends early")
            buffer[:] = data

        self.act("read_into", name, fill)

    def write(self, name: str, data: bytes) -> None:
        def put() -> None:
            self.state.objects[name] = bytes(data)
            self.state.owners.pop(name, None)
            self._world.object_written(self._process, name)

        self.act("write", name, put, writes=True)

    def create(self, name: str, data: bytes) -> bool:
        data = bytes(data)

        def put() -> bool:
            return self.state.objects.setdefault(name, data) is data

        return self.act("create", name, put, writes=True)

    def delete(self, name: str) -> None:
        def remove() -> None:
            self.state.objects.pop(name, None)
            self.state.owners.pop(name, None)

        self.act("delete", name, remove, writes=True)

    def retire(self, name: str) -> None:
        """As `delete`."""
        self.delete(name)

    def _get(self, name: str) -> bytes:
        if name not in self.state.objects:
            raise StoreMissing(f"{URL}/{name}: not there")
        return self.state.objects[name]

    # -- uploads -------------------------------------------------------------------------------------------------

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> SimUpload:
        state = self.state

        def open_upload() -> str:
            state.begun += 1
            token = f"{write_id}/{state.begun}"
            state.uploads[token] = OpenUpload(name, write_id, nbytes, chunk_bytes * state.part_chunks)
            return token

        token = self.act("begin", name, open_upload, writes=True)
        return SimUpload(self, name, nbytes, chunk_bytes * state.part_chunks, write_id, token)

    def resume(self, name: str, interrupted: InterruptedUpload) -> SimUpload:
        state = self.state

        def find() -> SimUpload:
            if state.kind == "opaque":
                raise StoreError(f"{URL}/{name}: this store cannot resume an upload")
            mine = (
                state.owners.get(name) == interrupted.write_id
                and len(state.objects.get(name, b"")) == interrupted.nbytes
            )
            upload = state.uploads.get(interrupted.token)
            if not mine and (upload is None or upload.write_id != interrupted.write_id):
                raise StoreMissing(f"{URL}/{name}: no upload {interrupted.token!r}", begin_anew=True)
            if upload is not None and state.kind == "parts":
                for index, crc in interrupted.crc32s.items():
                    if index in upload.parts and zlib.crc32(upload.parts[index]) != crc:
                        del upload.parts[index]
            return SimUpload(
                self,
                name,
                interrupted.nbytes,
                interrupted.part_bytes,
                interrupted.write_id,
                interrupted.token,
                published=mine,
            )

        return self.act("resume", name, find)

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        state = self.state

        def remove() -> builtins.list[str]:
            swept = [
                token for token, upload in state.uploads.items() if not is_kept(f"{upload.write_id}-", keep)
            ]
            for token in swept:
                self._world.upload_swept(state.uploads[token])
                del state.uploads[token]
            return [f"upload {token}" for token in swept]

        return self.act("sweep", "", remove, writes=True)


class SimUpload:
    """As `holdfast.store.base.Upload`."""

    def __init__(
        self,
        client: StoreClient,
        name: str,
        nbytes: int,
        part_bytes: int,
        write_id: str,
        token: str,
        *,
        published: bool = False,
    ) -> None:
        self._client, self._name, self._nbytes = client, name, nbytes
        self.part_bytes, self._write_id, self._token = part_bytes, write_id, token
        self.published = published
        self._state = client.state

    @property
    def token(self) -> str | None:
        return None if self._state.kind == "opaque" else self._token

    @property
    def _count(self) -> int:
        return -(-self._nbytes // self.part_bytes)

    def written(self) -> frozenset[int]:
        upload = self._state.uploads.get(self._token)
        if self.published or (upload is not None and self._state.kind == "file"):
            return frozenset(range(self._count))
        return frozenset(upload.parts if upload is not None else ())

    def _open(self) -> OpenUpload:
        upload = self._state.uploads.get(self._token)
        if upload is None:
            raise StoreError(f"{URL}/{self._name}: the upload was swept", begin_anew=True)
        return upload

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        def put() -> None:
            upload = self._open()
            data = b"".join(bytes(buffer) for buffer in buffers)  # read while it is sent, not before
            if self._state.kind == "parts" and zlib.crc32(data) != crc32:
                raise StoreError(f"{URL}/{self._name}: part {index}: BadDigest", retriable=True)
            upload.parts[index] = data

        self._client.act("write_part", self._name, put, writes=True)

    def publish(self) -> None:
        state = self._state
        if self.published:
            return

        def show() -> None:
            if state.owners.get(self._name) == self._write_id:
                return  # the answer to an earlier call was lost
            upload = self._open()
            if state.kind != "file" and set(upload.parts) != set(range(self._count)):
                missing = set(range(self._count)) - set(upload.parts)
                raise StoreError(f"{URL}/{self._name}: cannot be published: parts {missing} are missing")
            blank = bytes(self.part_bytes)
            data = b"".join(upload.parts.get(index, blank) for index in range(self._count))[: self._nbytes]
            state.objects[self._name] = data
            state.owners[self._name] = self._write_id
            del state.uploads[self._token]

        self._client.act("publish", self._name, show, writes=True)
        self.published = True

    def hand_over(self) -> None:
        self._client.act("hand_over", self._name, lambda: None)

    def abort(self) -> None:
        if not self.published:
            self._client.act(
                "abort", self._name, lambda: self._state.uploads.pop(self._token, None), writes=True
            )


def pristine(state: StoreState) -> Any:
    """A read-only view without faults, for the checks."""
    return _Reader(state)


class _Reader:
    url = URL
    request_bytes = 16 << 20

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def list(self) -> builtins.list[ObjectInfo]:
        return [ObjectInfo(name, len(data)) for name, data in sorted(self._state.objects.items())]

    def size(self, name: str) -> int:
        return len(self.read(name))

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        if name not in self._state.objects:
            raise StoreMissing(f"{URL}/{name}: not there")
        return self._state.objects[name]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(name)[offset : offset + len(buffer)]
