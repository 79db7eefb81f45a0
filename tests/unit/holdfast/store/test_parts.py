"""The ledger of written parts."""

from __future__ import annotations

import threading

import pytest

from holdfast.errors import StoreError
from holdfast.store.parts import PartLedger


def _bytes(nbytes: int) -> list[memoryview]:
    return [memoryview(bytes(nbytes))]


def test_parts_tile_the_file() -> None:
    ledger = PartLedger("f", nbytes=25, part_bytes=10)
    assert [ledger.place(index) for index in range(ledger.parts)] == [(0, 10), (10, 10), (20, 5)]
    assert PartLedger("f", nbytes=20, part_bytes=10).parts == 2


def test_a_part_counts_only_when_its_bytes_have_arrived() -> None:
    ledger = PartLedger("f", nbytes=5, part_bytes=10)
    with pytest.raises(OSError, match="lost"), ledger.track_part(0, _bytes(5)):
        raise OSError("lost")
    with pytest.raises(StoreError, match=r"1 of 1 parts are missing \(0\)"):
        ledger.require_complete()
    with ledger.track_part(0, _bytes(5)):
        pass
    ledger.require_complete()


def test_a_failed_replacement_strikes_out_what_was_there() -> None:
    """The old bytes may be half overwritten by then."""
    ledger = PartLedger("f", nbytes=5, part_bytes=10)
    with ledger.track_part(0, _bytes(5)):
        pass
    with pytest.raises(OSError, match="half"), ledger.track_part(0, _bytes(5)):
        raise OSError("half")
    with pytest.raises(StoreError, match="missing"):
        ledger.require_complete()


def test_after_close_nothing_enters_and_the_last_one_out_is_seen() -> None:
    ledger = PartLedger("f", nbytes=20, part_bytes=10)
    with ledger.track_part(0, _bytes(10)):
        assert not ledger.close()
        assert not ledger.is_closed_and_idle()
        with pytest.raises(StoreError, match="too late"), ledger.track_part(1, _bytes(10)):
            pass
        assert not ledger.wait_idle(0.001)
    assert ledger.is_closed_and_idle()
    assert ledger.wait_idle(0.0)


def test_waiting_ends_when_the_part_comes_home() -> None:
    ledger = PartLedger("f", nbytes=10, part_bytes=10)
    entered, leave = threading.Event(), threading.Event()

    def send() -> None:
        with ledger.track_part(0, _bytes(10)):
            entered.set()
            leave.wait()

    sender = threading.Thread(target=send)
    sender.start()
    entered.wait()
    with pytest.raises(StoreError, match="missing"):
        ledger.require_complete()
    leave.set()
    assert ledger.wait_idle(60.0)
    sender.join()
    ledger.require_complete()
