"""Only transient errors are retried, with growing random waits, within the budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.store.base import SMALL_BYTES_MAX
from holdfast.store.posix import PosixStore
from holdfast.store.retrying import RetryBudget, Retrying
from holdfast.store.wrapper import UploadWrapper


class _Failing(PosixStore):
    """Fails this many times before it succeeds."""

    def __init__(self, root: Path, failures: list[Exception]) -> None:
        super().__init__(root)
        self.failures = failures
        self.calls = 0

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return super().read(name, bytes_max)


def _store(
    root: Path, failures: list[Exception], waits: list[float], budget: RetryBudget | None = None
) -> Retrying:
    store = _Failing(root, failures)
    store.write("name", b"data")
    return Retrying(store, budget=budget, sleep=waits.append)


def _calls(store: Retrying) -> int:
    assert isinstance(store.inner, _Failing)
    return store.inner.calls


def test_a_retriable_error_is_retried(tmp_path: Path) -> None:
    waits: list[float] = []
    store = _store(tmp_path, [StoreError("busy", retriable=True)] * 3, waits)
    assert store.read("name") == b"data"
    assert _calls(store) == 4
    assert len(waits) == 3


@pytest.mark.parametrize(
    "error", [StoreError("denied"), StoreMissing("gone"), DamageError("flipped"), RuntimeError("a bug")]
)
def test_an_error_that_waiting_does_not_mend_is_raised_at_once(tmp_path: Path, error: Exception) -> None:
    waits: list[float] = []
    store = _store(tmp_path, [error], waits)
    with pytest.raises(type(error)) as caught:
        store.read("name")
    assert caught.value is error
    assert waits == []


def test_the_attempts_are_bounded_and_told(tmp_path: Path) -> None:
    waits: list[float] = []
    store = _store(tmp_path, [StoreError("busy", retriable=True)] * 99, waits, RetryBudget(attempts_max=5))
    with pytest.raises(StoreError, match="given up after 5 attempts of read") as caught:
        store.read("name")
    assert _calls(store) == 5
    assert caught.value.retriable


def test_the_seconds_are_bounded(tmp_path: Path) -> None:
    budget = RetryBudget(attempts_max=1000, seconds_max=0.0, first_wait_seconds=1.0)
    store = _store(tmp_path, [StoreError("busy", retriable=True)] * 99, [], budget)
    with pytest.raises(StoreError, match="given up after 1 attempts"):
        store.read("name")


def test_waits_are_random_and_bounded(tmp_path: Path) -> None:
    waits: list[float] = []
    budget = RetryBudget(attempts_max=40, first_wait_seconds=0.5, wait_seconds_max=3.0)
    store = _store(tmp_path, [StoreError("busy", retriable=True)] * 39, waits, budget)
    store.read("name")
    assert all(0 <= wait <= 3.0 for wait in waits)
    assert waits[0] <= 0.5
    assert len(set(waits)) > 20


def test_a_server_that_says_how_long_to_stay_away_is_believed_within_the_bounds(tmp_path: Path) -> None:
    waits: list[float] = []
    budget = RetryBudget(attempts_max=40, first_wait_seconds=0.5, wait_seconds_max=3.0)
    asked = [StoreError("busy", retriable=True, retry_after_seconds=2.0) for _ in range(20)]
    endless = [StoreError("busy", retriable=True, retry_after_seconds=86_400.0)]
    store = _store(tmp_path, [*asked, *endless], waits, budget)
    store.read("name")
    assert all(2.0 <= wait <= 3.0 for wait in waits)
    assert len(set(waits[:3])) == 3, "all would come back at the same moment"
    assert waits[-1] == 3.0


def test_the_calls_of_an_upload_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Retrying(PosixStore(tmp_path), sleep=lambda _: None)
    upload = store.begin("step.pt", nbytes=3, chunk_bytes=4096, write_id="w")
    assert isinstance(upload, UploadWrapper)
    inner = upload._inner
    for name, arguments in (("write_part", (0, [memoryview(b"abc")], 0)), ("publish", ())):
        monkeypatch.setattr(inner, name, _fail_once(getattr(inner, name)))
        getattr(upload, name)(*arguments)
    assert store.read("step.pt") == b"abc"


def _fail_once(call: Callable[..., None]) -> Callable[..., None]:
    failures = [StoreError("once", retriable=True)]

    def failing(*arguments: object) -> None:
        if failures:
            raise failures.pop()
        call(*arguments)

    return failing
