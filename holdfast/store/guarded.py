"""Store that checks the lease before each attempt of a change that others can see.

    Retrying ─► GuardedStore ─► backend        the lease is checked again before each retry
                     └─ FencedError: no further retry

Retries may take minutes, and meanwhile another writer may take the run over. Objects under `.holdfast/` need no check:
only their writer uses their names.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.faultpoint import Point, reach
from holdfast.store.base import Store, Upload
from holdfast.store.retrying import Retrying
from holdfast.store.wrapper import Result, StoreWrapper, UploadWrapper

_PRIVATE = ".holdfast/"
_VISIBLE = ("write", "create", "delete", "retire", "publish")


def guarded(store: Store, check: Callable[[], None]) -> Store:
    """Return the store with `check` before each visible change; `check` raises `FencedError` if the run is not ours."""
    if isinstance(store, Retrying):
        return store.with_inner(GuardedStore(store.inner, check))
    return GuardedStore(store, check)


class GuardedStore(StoreWrapper):
    """Checks the lease before each change that others can see."""

    def __init__(self, inner: Store, check: Callable[[], None]) -> None:
        super().__init__(inner)
        self._check = check

    def forward(self, method: str, call: Callable[[], Result], name: str = "") -> Result:
        """See `StoreWrapper`. Raises `FencedError` when the run is no longer ours."""
        if method == "sweep":
            self._check()
        elif method in _VISIBLE and not name.startswith(_PRIVATE):
            self._check()
            reach(Point.CLAIM_SEEN)
        return call()

    def wrap(self, upload: Upload) -> Upload:
        return _GuardedUpload(upload, self)


class _GuardedUpload(UploadWrapper):
    def publish(self) -> None:
        """Check the lease only before the first publication; parts and an abort are not visible to others."""
        if self.published:
            self._inner.publish()
        else:
            super().publish()
