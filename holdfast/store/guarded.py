"""A store in which nothing becomes visible, changes or goes without a look at the claim, in each single try.

    Retrying ─► GuardedStore ─► backend        the claim is looked at again before each repetition
                     └─ FencedError: no further try

A call may be repeated for minutes, and meanwhile another writer may take the run over. Objects under `.holdfast/` have
names that only its writer uses, and needs no look.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence

from holdfast.faultpoint import Point, reach
from holdfast.store.base import SMALL_BYTES_MAX, BegunUpload, ObjectInfo, Store, Upload
from holdfast.store.names import Keep
from holdfast.store.retrying import Retrying

_PRIVATE = ".holdfast/"


def guarded(store: Store, check: Callable[[], None]) -> Store:
    """The same store, with `check` before each try of an act that others can see.

    Args:
        store: Any store; the tries of a `Retrying` one are guarded one by one.
        check: Asks the store once whether the run is still ours; raises `FencedError` if not.
    """
    if isinstance(store, Retrying):
        return store.around(GuardedStore(store.inner, check))
    return GuardedStore(store, check)


class GuardedStore:
    """See the module. Same interface, same threads."""

    def __init__(self, inner: Store, check: Callable[[], None]) -> None:
        self._inner, self._check = inner, check

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def request_bytes(self) -> int:
        return self._inner.request_bytes

    def close(self) -> None:
        close = getattr(self._inner, "close", None)
        if close is not None:
            close()

    def check(self, *, write: bool) -> None:
        self._inner.check(write=write)

    def list(self) -> list[ObjectInfo]:
        return self._inner.list()

    def size(self, name: str) -> int:
        return self._inner.size(name)

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        return self._inner.read(name, bytes_max)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._inner.read_into(name, offset, buffer)

    def write(self, name: str, data: bytes) -> None:
        """As the store's, while the run is ours."""
        self._look(name)
        self._inner.write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """As the store's, while the run is ours."""
        self._look(name)
        return self._inner.create(name, data)

    def delete(self, name: str) -> None:
        """As the store's, while the run is ours."""
        self._look(name)
        self._inner.delete(name)

    def retire(self, name: str) -> None:
        """As the store's, while the run is ours."""
        self._look(name)
        self._inner.retire(name)

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> GuardedUpload:
        """As the store's; what it has written is not visible before it is published."""
        return GuardedUpload(
            self._inner.begin(name, nbytes=nbytes, chunk_bytes=chunk_bytes, write_id=write_id), self._check
        )

    def resume(self, name: str, begun: BegunUpload) -> GuardedUpload:
        return GuardedUpload(self._inner.resume(name, begun), self._check)

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        """As the store's, while the run is ours."""
        self._check()
        return self._inner.sweep(keep)

    def _look(self, name: str) -> None:
        if not name.startswith(_PRIVATE):
            self._check()
            reach(Point.CLAIM_SEEN)


class GuardedUpload:
    """An upload that is published only while the run is ours."""

    def __init__(self, inner: Upload, check: Callable[[], None]) -> None:
        self._inner, self._check = inner, check

    @property
    def part_bytes(self) -> int:
        return self._inner.part_bytes

    @property
    def token(self) -> str | None:
        return self._inner.token

    @property
    def published(self) -> bool:
        return self._inner.published

    def written(self) -> frozenset[int]:
        return self._inner.written()

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        self._inner.write_part(index, buffers, crc32)

    def publish(self) -> None:
        """As the upload's, while the run is ours."""
        if not self._inner.published:
            self._check()
            reach(Point.CLAIM_SEEN)
        self._inner.publish()

    def abort(self) -> None:
        """As the upload's: it takes back only what this very upload wrote."""
        self._inner.abort()
