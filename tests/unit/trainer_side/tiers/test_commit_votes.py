"""Ranks agree among themselves; no rank hangs, whichever one dies, and an idle rank hardly polls."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.errors import ConfigError, HoldfastError, PeerLost, ProtocolError, StateError
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.state_messages import Agreement, Proposal
from tests.unit.trainer_side.tiers.ranks import Net, until
from trainer_side.tiers.commit_votes import CommitVotes
from trainer_side.tiers.rank0_votes import VoteLimits
from trainer_side.tiers.tier import StepVerdict

RANKS = 3


class Ranks:
    def __init__(self, count: int = RANKS, **settings: Any) -> None:
        self.net = Net(count)
        self.heard: list[list[StepVerdict]] = [[] for _ in range(count)]
        limits = VoteLimits(settings.pop("agree_seconds_max", 60.0), settings.pop("seal_seconds_max", 60.0))
        self.councils = [
            CommitVotes(self.net.port(rank), limits, on_verdict=self.heard[rank].append, **settings)
            for rank in range(count)
        ]

    def verdicts(self, rank: int) -> list[tuple[int, bool]]:
        return [(verdict.order[1], verdict.complete) for verdict in self.heard[rank]]

    def close(self, seconds_max: float = 60.0) -> None:
        threads = [threading.Thread(target=council.close, args=(seconds_max,)) for council in self.councils]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def _proposal(dtype: str = "float32", pickle_bytes: int = 100) -> Proposal:
    return Proposal(dtype, [["model/w", dtype, [4], -1]], pickle_bytes, {"rng": 50})


def test_ranks_hear_that_a_step_is_complete_when_the_last_has_sealed_it(ranks: Ranks) -> None:
    for rank in (2, 0):
        ranks.councils[rank].vote_sealed(1, (1, 7), "a")
    time.sleep(0.05)
    assert not any(ranks.heard)
    ranks.councils[1].vote_sealed(1, (1, 7), "a")
    until(lambda: all(ranks.heard))
    assert all(heard == [StepVerdict(1, (1, 7), complete=True)] for heard in ranks.heard)


def test_ranks_hear_that_a_rank_skips_a_step_and_why(ranks: Ranks) -> None:
    ranks.councils[0].vote_sealed(0, (1, 7), "a")
    ranks.councils[2].vote_skipped(0, (1, 7), DeclineCause.BUSY.because("no slot is free"))
    until(lambda: all(ranks.heard))
    assert {heard[0].why for heard in ranks.heard} == {Reason("busy", "rank 2: busy: no slot is free")}


def test_a_rank_that_does_not_seal_voids_the_step_at_rank_0s_deadline() -> None:
    now = [0.0]
    ranks = Ranks(seal_seconds_max=20.0, clock=lambda: now[0])
    ranks.councils[0].vote_sealed(0, (1, 7), "a")
    ranks.councils[1].vote_sealed(0, (1, 7), "a")
    rank0 = ranks.councils[0]._rank0
    assert rank0 is not None
    ballots = rank0._votes._ballots
    until(lambda: ballots and ballots[0, (1, 7)].sealed == {0, 1})
    now[0] += 20.0
    time.sleep(0.05)
    assert not any(ranks.heard)
    now[0] += 0.1
    until(lambda: all(ranks.heard))
    assert [ranks.verdicts(rank) for rank in range(RANKS)] == [[(7, False)]] * RANKS
    assert ranks.heard[1][0].why == Reason("late", "rank 2 has not sealed it within 20 s")
    ranks.close()


def test_a_dead_rank_makes_it_void_at_once(ranks: Ranks) -> None:
    ranks.councils[0].vote_sealed(0, (1, 7), "a")
    ranks.councils[1].vote_sealed(0, (1, 7), "a")
    time.sleep(0.05)
    ranks.net.dead.add(2)
    until(lambda: ranks.heard[0] and ranks.heard[1])
    assert ranks.heard[1][0].why == Reason("lost", "rank 2 is dead")


def test_a_silent_rank_0_decides_nothing_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer_side.tiers.commit_votes._SLACK_SECONDS", 0.1)
    ranks = Ranks(2, seal_seconds_max=0.1)
    ranks.net.cut.add(0)
    ranks.councils[1].vote_sealed(0, (1, 7), "a")
    until(lambda: ranks.councils[1].problem)
    assert not ranks.heard[1], "what rank 0 may have called complete elsewhere is not called void here"
    assert isinstance(ranks.councils[1].problem, PeerLost)
    assert caplog.text.count("local tiers take nothing new") == 1
    ranks.close(0.1)  # rank 0 gets no good-bye


def test_ranks_agree_on_the_largest_reserves(ranks: Ranks) -> None:
    answers: dict[int, Agreement] = {}

    def ask(rank: int) -> None:
        answers[rank] = ranks.councils[rank].agree(_proposal(pickle_bytes=100 * (rank + 1)))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == RANKS
    assert answers[0] == answers[1] == answers[2]


def test_ranks_with_other_tensors_are_refused_by_name() -> None:
    ranks = Ranks(2)
    errors: dict[int, HoldfastError] = {}

    def ask(rank: int) -> None:
        with pytest.raises(StateError) as caught:
            ranks.councils[rank].agree(_proposal("float32" if rank == 0 else "float16"))
        errors[rank] = caught.value

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert str(errors[0]) == str(errors[1])
    assert "rank 1: tensor model/w: expected (float32 [4], replicated) as on rank 0" in str(errors[0])
    ranks.close()


def test_a_rank_whose_state_alone_has_changed_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2)
    ranks.councils[0].send_fits(20)
    with pytest.raises(
        StateError, match="step 20: the state of rank 1 has changed, and that of rank 0 has not"
    ):
        ranks.councils[1].agree(dataclasses.replace(_proposal("float16"), step=20))
    until(lambda: "rank 0: other ranks cannot save: step 20" in caplog.text)
    ranks.close()


def _concur(ranks: Ranks, errors: dict[int, HoldfastError]) -> list[HoldfastError | None]:
    """Let all ranks agree on these errors; return each rank's result."""
    heard: list[HoldfastError | None] = [None] * len(ranks.councils)

    def ask(rank: int) -> None:
        try:
            ranks.councils[rank].confirm_ready(errors.get(rank))
        except HoldfastError as error:
            heard[rank] = error

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(heard))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return heard


def test_a_ranks_error_is_heard_by_all(ranks: Ranks) -> None:
    assert _concur(ranks, {}) == [None] * RANKS
    mine = ConfigError("tier file:/x: no room")
    heard = _concur(ranks, {1: mine})
    assert heard[1] is mine
    for other in (heard[0], heard[2]):
        assert isinstance(other, ConfigError)
        assert str(other) == "rank 1: tier file:/x: no room"
    assert _concur(ranks, {}) == [None] * RANKS


@pytest.mark.parametrize("how", ["late", "dead"])
def test_a_rank_that_does_not_get_ready_is_named(how: str) -> None:
    ranks = Ranks(2, agree_seconds_max=0.1 if how == "late" else 20.0)
    if how == "dead":
        threading.Timer(0.1, lambda: ranks.net.dead.add(1)).start()
    with pytest.raises(PeerLost, match="rank 1"):
        ranks.councils[0].confirm_ready(None)
    ranks.close()


def test_a_rank_that_does_not_come_to_agree_is_named() -> None:
    ranks = Ranks(2, agree_seconds_max=0.1)
    with pytest.raises(PeerLost, match=r"rank 0 waited 0.1 s for the layout of rank 1; do all ranks save"):
        ranks.councils[0].agree(_proposal())
    ranks.close()


def test_ranks_hear_how_much_room_the_pickle_gets(ranks: Ranks) -> None:
    ranks.councils[0].announce_room(10_000)
    until(lambda: all(council.new_pickle_reserve_bytes >= 10_000 for council in ranks.councils))
    assert len({council.new_pickle_reserve_bytes for council in ranks.councils}) == 1


def test_an_idle_council_looks_a_hundred_times_a_second(ranks: Ranks) -> None:
    begun, before = time.monotonic(), list(ranks.net.polls)
    time.sleep(0.5)
    looks = [after - earlier for earlier, after in zip(before, ranks.net.polls, strict=True)]
    most = 100 * (time.monotonic() - begun) + 10  # the sleep may have been longer
    assert max(looks) <= most


def test_closing_waits_for_the_verdicts_of_all() -> None:
    ranks = Ranks()
    for rank in range(RANKS):
        ranks.councils[rank].vote_sealed(0, (1, 7), "a")
    ranks.close()
    assert [ranks.verdicts(rank) for rank in range(RANKS)] == [[(7, True)]] * RANKS


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (b"what?", "rank 1: control message of 5 bytes"),
        (wire.encode(Kind.BYE)[:-1] + b"?", "rank 1: control message: expected CRC-32"),
        (wire.encode(Kind.OFFER, step=3), "rank 1 sent OFFER to rank 0, which it must not"),
        (wire.encode(Kind.COMPLETE, attempt=1, step=3), "rank 1 sent COMPLETE to rank 0"),
        (wire.encode(Kind.ROOM, arg=3), "rank 1 sent ROOM to rank 0"),
        (wire.encode(Kind.NOTICE), "rank 1 sent NOTICE to rank 0"),
        (wire.encode(Kind.READY, body=b'{"code": 3}'), "READY: code is 3, expected str"),
        (wire.encode(Kind.PROPOSE, body=b"no"), "PROPOSE: the body cannot be unpacked"),
    ],
)
def test_a_message_that_no_rank_may_send_ends_the_council_by_name(message: bytes, problem: str) -> None:
    ranks = Ranks(2)
    ranks.net.port(1).send(0, message)
    until(lambda: ranks.councils[0].problem)
    assert isinstance(ranks.councils[0].problem, ProtocolError)
    assert problem in str(ranks.councils[0].problem)
    ranks.close(0.1)


@pytest.mark.parametrize(
    ("sender", "message", "problem"),
    [
        (2, wire.encode(Kind.VOID, attempt=1, step=3), "rank 2 sent VOID to rank 1; only rank 0"),
        (0, wire.encode(Kind.SEALED, attempt=1, step=3), "rank 1: rank 0 sent SEALED, which it must not"),
        (0, wire.encode(Kind.SAVE_AT, body=b"{}"), "rank 1: rank 0 sent SAVE_AT, which it must not"),
        (0, wire.encode(Kind.REFUSED, body=b"{}"), "REFUSED: code is None, expected str"),
    ],
)
def test_a_message_that_rank_0_may_not_send_ends_the_council_by_name(
    sender: int, message: bytes, problem: str
) -> None:
    ranks = Ranks(3)
    ranks.net.port(sender).send(1, message)
    until(lambda: ranks.councils[1].problem)
    assert problem in str(ranks.councils[1].problem)
    assert not ranks.heard[1]
    ranks.close(0.1)


def test_a_reason_that_is_no_text_or_very_long_is_cut_and_told(ranks: Ranks) -> None:
    ranks.councils[1].vote_skipped(0, (1, 7), DeclineCause.FAILED.because("/mnt/\udcff" + "x" * 5000))
    until(lambda: all(ranks.heard))
    why = ranks.heard[2][0].why.text
    assert why.startswith("rank 1: failed: /mnt/\\udcffxxx")
    assert len(why) == 4000
