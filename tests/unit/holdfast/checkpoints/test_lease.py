"""The claim: at most one writer believes that it owns the run, and a writer knows when it no longer does."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from holdfast.checkpoints.identity import Identity
from holdfast.checkpoints.lease import Lease
from holdfast.errors import FencedError, StoreError
from holdfast.sealed import seal
from tests.support.checkpoints import add_small
from tests.support.memory_store import MemoryStore

HERE = Identity.of_this_process()
ELSEWHERE = dataclasses.replace(HERE, host="kelp-2", boot_id="another-boot", pid=4711)


def no_sleep(_: float) -> None:
    raise AssertionError("nothing to wait for in the same place")


def a_dead_process() -> Identity:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return dataclasses.replace(HERE, pid=process.pid)


def claim_of(store: MemoryStore, attempt: int) -> dict[str, object]:
    document = json.loads(store.objects[f".holdfast/writer-{attempt:06d}.json"])
    assert isinstance(document, dict)
    return document


def changed(claim: bytes, **changes: object) -> bytes:
    """Return a claim as written by another writer."""
    document = json.loads(claim) | changes
    del document["claim_crc32"]
    return seal(json.dumps(document).encode(), "claim_crc32")


def take(store: MemoryStore, identity: Identity = HERE, sleep: Callable[[float], None] = no_sleep) -> Lease:
    return Lease.acquire(store, identity=identity, sleep=sleep)


def test_the_first_writer_is_attempt_one() -> None:
    store = MemoryStore()
    claim = take(store)
    assert claim.attempt == 1
    document = claim_of(store, 1)
    assert (document["host"], document["pid"], document["write_id"]) == (
        HERE.host,
        os.getpid(),
        claim.write_id,
    )
    claim.check()


def test_a_live_writer_in_the_same_place_is_not_displaced() -> None:
    store = MemoryStore()
    first = take(store)
    with pytest.raises(
        FencedError, match=rf"attempt 1 .*process {os.getpid()} on {HERE.host}.*Wait for it or end it"
    ):
        take(store)
    first.check()


def test_after_a_release_the_next_attempt_begins() -> None:
    store = MemoryStore()
    first = take(store)
    first.release()
    first.release()
    assert take(store).attempt == 2


def test_a_dead_process_in_the_same_place_is_succeeded_at_once() -> None:
    store = MemoryStore()
    take(store, a_dead_process())
    assert take(store).attempt == 2


def test_a_reused_pid_is_not_taken_for_the_writer() -> None:
    store = MemoryStore()
    take(store, dataclasses.replace(HERE, started=HERE.started + 1))
    assert take(store).attempt == 2


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        zombie = dataclasses.replace(HERE, pid=process.pid, started=0)
        assert not zombie.is_running()
    finally:
        process.wait()


def test_another_boot_or_pid_namespace_is_another_place() -> None:
    assert not HERE.shares_pid_namespace(dataclasses.replace(HERE, boot_id="x"))
    assert not HERE.shares_pid_namespace(dataclasses.replace(HERE, pid_namespace="x"))
    assert not HERE.shares_pid_namespace(dataclasses.replace(HERE, host="x"))
    assert HERE.shares_pid_namespace(dataclasses.replace(HERE, pid=1, started=5))
    unknown = dataclasses.replace(HERE, boot_id="")
    assert not unknown.shares_pid_namespace(unknown)


def test_a_silent_writer_elsewhere_is_succeeded_after_two_heartbeats() -> None:
    store = MemoryStore()
    Lease.acquire(store, identity=ELSEWHERE, heartbeat_seconds=8.0)
    slept: list[float] = []
    assert take(store, sleep=slept.append).attempt == 2
    # The holder's own heartbeat counts when it is slower than ours.
    assert sum(slept) == pytest.approx(16.0)


def test_a_beating_writer_elsewhere_is_not_displaced() -> None:
    store = MemoryStore()
    remote = take(store, ELSEWHERE)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 5:  # one sign of life is enough
            remote.beat()

    with pytest.raises(FencedError, match=r"process 4711 on kelp-2 gave a sign of life"):
        take(store, sleep=sleep)
    assert sum(slept) <= 10.0


def test_a_writer_that_releases_while_being_watched_is_succeeded() -> None:
    store = MemoryStore()
    remote = take(store, ELSEWHERE)
    assert take(store, sleep=lambda _: remote.release()).attempt == 2


def test_a_heartbeat_from_outside_cannot_make_us_wait_for_hours() -> None:
    store = MemoryStore()
    Lease.acquire(store, identity=ELSEWHERE, heartbeat_seconds=1e9)
    slept: list[float] = []
    take(store, sleep=slept.append)
    assert sum(slept) == pytest.approx(120.0)


def test_a_takeover_asks_nobody_and_fences_the_one_before() -> None:
    store = MemoryStore()
    first = take(store)
    second = Lease.acquire(store, identity=ELSEWHERE, takeover=True, sleep=no_sleep)
    assert second.attempt == 2
    second.check()
    for act in (first.check, first.beat):
        with pytest.raises(
            FencedError, match=r"attempt 2 \(process 4711 on kelp-2\) took the run over.*end the other"
        ):
            act()


def test_a_fenced_writer_leaves_no_trace_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    first = take(store)
    Lease.acquire(store, identity=ELSEWHERE, takeover=True)
    before = dict(store.objects)
    with caplog.at_level(logging.WARNING, logger="holdfast.claim"):
        first.release()
    assert store.objects == before
    assert "the claim on the run could not be released" in caplog.text


def test_beats_count_and_stop_with_the_release() -> None:
    store = MemoryStore()
    claim = take(store)
    claim.beat()
    claim.beat()
    assert claim_of(store, 1)["beat"] == 2
    claim.release()
    claim.beat()
    assert claim_of(store, 1) == claim_of(store, 1) | {"beat": 2, "released": True}


def test_two_takers_at_once_get_one_claim() -> None:
    store = MemoryStore()
    at_once = threading.Barrier(8)
    outcomes: list[Lease | FencedError] = []

    def taker() -> None:
        at_once.wait()
        try:
            outcomes.append(take(store))
        except FencedError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=taker) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    claims = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
    assert len(outcomes) == 8
    assert [claim.attempt for claim in claims] == [1]
    claims[0].check()


class LosesTheRace(MemoryStore):
    """Another writer creates its claim just before ours."""

    def __init__(self, rival: Identity) -> None:
        super().__init__()
        self.rival: Identity | None = rival

    def create(self, name: str, data: bytes) -> bool:
        if self.rival is not None:
            theirs = changed(data, pid=self.rival.pid, started=self.rival.started, write_id="rival")
            self.rival = None
            super().create(name, theirs)
        return super().create(name, data)


def test_the_loser_of_a_race_reads_again_and_finds_the_winner_alive() -> None:
    with pytest.raises(FencedError, match="attempt 1 owns this run"):
        take(LosesTheRace(HERE))


def test_the_loser_of_a_race_against_one_that_died_gets_the_next() -> None:
    assert take(LosesTheRace(a_dead_process())).attempt == 2


class LosesTheAnswer(MemoryStore):
    """The create succeeds, its answer is lost, and the retry finds the file there."""

    def create(self, name: str, data: bytes) -> bool:
        super().create(name, data)
        return False


def test_a_create_whose_answer_was_lost_is_still_ours() -> None:
    claim = take(LosesTheAnswer())
    assert claim.attempt == 1
    claim.check()


class NotExclusive(MemoryStore):
    """A backend whose create is a plain write, and another writer wrote after us."""

    def create(self, name: str, data: bytes) -> bool:
        self.write(name, changed(data, write_id="rival"))
        return True


def test_where_create_is_not_exclusive_reading_back_shows_who_was_last() -> None:
    with pytest.raises(FencedError, match="wrote over the claim"):
        take(NotExclusive())


def test_a_claim_that_was_removed_is_not_ours_any_more() -> None:
    store = MemoryStore()
    claim = take(store)
    store.objects.clear()
    with pytest.raises(FencedError, match="removed"):
        claim.check()


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"\xff\x00",
        b"[1]",
        b'{"attempt": 7',
        b"[" * 100_000,
        seal(b'{"attempt":7}', "claim_crc32"),
    ],
)
def test_a_damaged_claim_counts_as_dead_with_a_warning(
    damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    store.objects[".holdfast/writer-000007.json"] = damage
    with caplog.at_level(logging.WARNING, logger="holdfast.claim"):
        assert take(store).attempt == 8
    assert "writer-000007.json: damaged claim" in caplog.text


def test_a_claim_under_another_number_counts_as_dead() -> None:
    store = MemoryStore()
    take(store)
    store.objects[".holdfast/writer-000003.json"] = store.objects[".holdfast/writer-000001.json"]
    assert take(store).attempt == 4


def test_old_claims_are_pruned_and_numbers_go_on() -> None:
    store = MemoryStore()
    for attempt in range(1, 7):
        claim = take(store)
        assert claim.attempt == attempt
        claim.release()
    assert sorted(store.objects) == [f".holdfast/writer-{attempt:06d}.json" for attempt in (4, 5, 6)]


class CannotDelete(MemoryStore):
    def delete(self, name: str) -> None:
        raise StoreError(f"{name}: no permission")


def test_a_huge_claim_counts_as_dead_and_says_its_size(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    store.objects[".holdfast/writer-000007.json"] = bytes((1 << 16) + 1)
    with caplog.at_level(logging.WARNING, logger="holdfast.claim"):
        assert Lease.acquire(store).attempt == 8
    assert "writer-000007.json: 65537 bytes, expected at most 65536; not read" in caplog.text
    assert "find out who did, and move it away" in caplog.text


def test_a_claim_that_cannot_be_pruned_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    store = CannotDelete()
    with caplog.at_level(logging.WARNING, logger="holdfast.claim"):
        for _ in range(4):
            take(store).release()
    assert "an old claim on the run could not be removed" in caplog.text


def test_numbers_grow_even_when_the_claims_were_cleared_away() -> None:
    store = MemoryStore()
    add_small(store, step=10, attempt=4)
    add_small(store, step=20, attempt=2)
    store.objects["step-000000030.json"] = b"damaged"
    assert take(store).attempt == 5


@pytest.mark.parametrize("planted", [999999999999999999, 999999999, 2_000_000])
def test_a_claim_with_a_number_far_from_all_others_does_not_end_the_run(
    planted: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    store.objects[f".holdfast/writer-{planted:06d}.json"] = b"{}"
    claim = Lease.acquire(store, heartbeat_seconds=5.0)
    assert claim.attempt == 1
    claim.check()
    claim.release()
    assert f"writer-{planted}.json" in caplog.text
