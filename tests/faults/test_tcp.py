"""Faults of the TCP transport: cut links, wrong keys and certificates, strangers, jobs started twice, frozen ranks."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, PeerLost
from holdfast.image.entries import Extent
from holdfast.net.handshake import Hello, JobStart, challenge
from holdfast.net.tls import RankTls, StagerTls
from tests.support.certificates import SignedPair, TestAuthority
from tests.support.cut_link import cut_link
from tests.support.turned_stager import KEY, SECONDS_MAX, TurnedStager
from trainer_side.ranks import connecting
from trainer_side.ranks.ports import GenerationOver, StartReplaced
from trainer_side.ranks.tcp_stager_port import StagerTarget, TcpStagerPort, connect_to_stager

_RECONNECT_SECONDS = 1.0
_LONG_SECONDS = 20.0  # to reconnect on a busy machine, in tests that must not lose a rank
_ranks: list[TcpStagerPort] = []  # of this test


@pytest.fixture
def stager() -> Iterator[TurnedStager]:
    with contextlib.closing(TurnedStager()) as stager:
        yield stager


@pytest.fixture(autouse=True)
def _ranks_end() -> Iterator[None]:
    yield
    while _ranks:
        _ranks.pop().disconnect(0.0, lost=True)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path)


def _tls(pair: SignedPair) -> StagerTls:
    return StagerTls(pair.cert, pair.key)


def _connect(
    port: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    launch: str = "launch",
    incarnation: bytes = b"1" * 16,
    generation: int = 0,
    lead_attempt: int = 0,
    key: bytes = KEY,
    seconds_max: float = 20.0,
    reconnect_seconds_max: float = _RECONNECT_SECONDS,
    tls_ca: Path | None = None,
) -> TcpStagerPort:
    rank_port = connect_to_stager(
        TrainerConfig(connections=2, reconnect_seconds_max=reconnect_seconds_max, tls_ca=tls_ca),
        StagerTarget(f"127.0.0.1:{port}", key, lead_attempt),
        rank=rank,
        ranks=ranks,
        start=JobStart(launch, incarnation, generation),
        seconds_max=seconds_max,
    )
    _ranks.append(rank_port)
    return rank_port


def _joined(
    stager: TurnedStager,
    threads: ThreadPoolExecutor,
    port: int | None = None,
    reconnect_seconds_max: float = _RECONNECT_SECONDS,
    tls_ca: Path | None = None,
) -> TcpStagerPort:
    """A rank that the stager serves."""
    coming = threads.submit(
        _connect,
        port or stager.port_number,
        reconnect_seconds_max=reconnect_seconds_max,
        tls_ca=tls_ca,
    )
    stager.open_next(reconnect_seconds_max)
    stager.until(coming.done, "the rank to be admitted")
    return coming.result()


def _refused(stager: TurnedStager, coming: Future[TcpStagerPort], error: type[Exception]) -> str:
    """The error message that the rank gets."""
    stager.until(coming.done, "the rank to be refused")
    with pytest.raises(error) as caught:
        coming.result()
    return str(caught.value)


@pytest.mark.parametrize("seed", range(4))
def test_a_link_that_is_cut_again_and_again_loses_and_doubles_nothing(
    stager: TurnedStager, threads: ThreadPoolExecutor, seed: int
) -> None:
    _cut_again_and_again(stager, threads, seed)


@pytest.mark.parametrize("seed", range(2))
def test_a_link_with_tls_that_is_cut_again_and_again_loses_and_doubles_nothing(
    threads: ThreadPoolExecutor, authority: TestAuthority, seed: int
) -> None:
    with contextlib.closing(TurnedStager(tls=_tls(authority.sign("stager")))) as stager:
        _cut_again_and_again(stager, threads, seed, authority.cert)


def _cut_again_and_again(
    stager: TurnedStager, threads: ThreadPoolExecutor, seed: int, tls_ca: Path | None = None
) -> None:
    rng = random.Random(seed)
    with cut_link(stager.port_number) as link:
        rank = _joined(stager, threads, link.port, _LONG_SECONDS, tls_ca)
        assert stager.port is not None
        link.cut_each_after(rng.choice((900_000, 1_300_000, 2_000_000)))
        payloads = [rng.randbytes(rng.choice((1, 5000, 400_000))) for _ in range(24)]
        slots = [bytearray(len(payload)) for payload in payloads]
        there = [rng.randbytes(rng.choice((0, 10, 90_000))) for _ in range(60)]
        back = [rng.randbytes(rng.choice((0, 10, 90_000))) for _ in range(60)]
        for slot, memory in enumerate(slots):
            stager.port.post(0, slot, memoryview(memory), (Extent(0, len(memory)),))
        for message in back:
            stager.port.send(0, message)

        is_heard = threading.Event()

        def talk() -> list[bytes]:
            heard: list[bytes] = []
            handles = [rank.send_payload(memoryview(p), slot, [len(p)]) for slot, p in enumerate(payloads)]
            for message in there:
                rank.send(message)
                heard.extend(rank.poll())
            deadline = time.monotonic() + SECONDS_MAX
            while len(heard) < len(back) or handles or not is_heard.is_set():
                assert time.monotonic() < deadline, f"{len(heard)} messages, {len(handles)} payloads left"
                heard.extend(rank.poll())
                handles = [handle for handle in handles if not rank.is_sent(handle)]
                time.sleep(0.0005)
            return heard

        talking = threads.submit(talk)
        received: dict[int, int] = {}

        def all_came() -> bool:
            assert stager.port is not None
            assert not stager.lost
            if talking.done():
                talking.result()
            for slot in range(len(slots)):
                if slot not in received and (nbytes := stager.port.pop_received(0, slot)) is not None:
                    received[slot] = nbytes
            if len(received) == len(slots) and len(stager.messages) == len(there):
                is_heard.set()
            return talking.done()

        stager.until(all_came, "everything to arrive")
        assert talking.result() == back
        assert stager.messages == [(0, message) for message in there]
        assert slots == payloads
        assert link.cuts >= 3  # connections
        assert stager.lost == []


def test_a_rank_that_does_not_come_back_is_lost_once_on_both_sides(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    with cut_link(stager.port_number) as link:
        rank = _joined(stager, threads, link.port)
        link.refuse(True)
        link.cut()
        stager.until(lambda: bool(stager.lost), "the rank to be lost")
        with pytest.raises(PeerLost, match="could not be reached within 1 s"):
            _poll_until_raised(rank)
        link.refuse(False)
        # The rank was declared lost: it is not admitted again, just like a frozen rank that wakes up late.
        late = threads.submit(_connect, link.port)
        assert "given up" in _refused(stager, late, PeerLost)
    assert [number for number, _ in stager.lost] == [0]


def _poll_until_raised(rank: TcpStagerPort) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline:
        rank.poll()
        time.sleep(0.001)


@pytest.mark.parametrize("key", [b"", b"x" * 32])
def test_another_key_is_refused_and_named(
    stager: TurnedStager, threads: ThreadPoolExecutor, key: bytes
) -> None:
    coming = threads.submit(_connect, stager.port_number, key=key)
    assert "another key" in _refused(stager, coming, ConfigError)
    assert stager.listener.next_job() is None


def test_a_stager_is_not_believed_either(threads: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        coming = threads.submit(_connect, int(server.getsockname()[1]))
        sock, _ = server.accept()
        with sock:
            hello = sock.recv(4096)
            sock.sendall(challenge(b"x" * 32, hello, os.urandom(32)))
            with pytest.raises(ConfigError, match="another key"):
                coming.result(SECONDS_MAX)
            assert sock.recv(4096) == b""  # the stager sends no proof to a stranger


def test_strangers_cost_neither_memory_nor_the_ranks_their_place(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    strangers = [socket.create_connection(("127.0.0.1", stager.port_number)) for _ in range(600)]
    hello = Hello(0, 1, 0, "launch", b"1" * 16, b"n" * 32).to_bytes()
    said = (b"", b"\xff" * 200, hello[:40], hello + b"\xff" * 5000, b"GET / HTTP/1.1\r\n\r\n")
    for number, stranger in enumerate(strangers):
        stranger.setblocking(False)
        with contextlib.suppress(OSError):  # idle, wrong proofs, half a hello, a hello and too much data
            stranger.send(said[number % len(said)])
        stager.turn()
    rank = _joined(stager, threads)
    rank.send(b"still served")
    stager.until(lambda: bool(stager.messages))
    assert stager.messages == [(0, b"still served")]
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_dawdles_is_hung_up_on(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.job_listener._GREETING_SECONDS_MAX", 0.2)
    with (
        contextlib.closing(TurnedStager()) as stager,
        socket.create_connection(("127.0.0.1", stager.port_number)) as stranger,
    ):
        stranger.sendall(b"HOLD")
        _joined(stager, threads)  # a stager that serves a job checks strangers too
        stager.until(lambda: _hung_up(stranger), "the stranger to be hung up on")


def _hung_up(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_recorded_hello_and_proof_open_nothing(stager: TurnedStager, threads: ThreadPoolExecutor) -> None:
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        coming = threads.submit(_connect, int(server.getsockname()[1]))
        here, _ = server.accept()
        with here, socket.create_connection(("127.0.0.1", stager.port_number)) as there:
            here.settimeout(0.01)
            there.settimeout(0.01)

            def carry() -> bool:
                for source, target in ((here, there), (there, here)):
                    with contextlib.suppress(OSError):
                        data = source.recv(4096)
                        if source is here and data:
                            recorded.append(data)
                        target.sendall(data)
                return stager.listener.next_job() is not None

            stager.until(carry, "the hello and the proof to pass")
            stager.open_next()
            stager.until(lambda: carry() or coming.done(), "the rank to be admitted")
            assert stager.port is not None
            with socket.create_connection(("127.0.0.1", stager.port_number)) as replayed:
                replayed.sendall(recorded[0])
                stager.turn()
                replayed.sendall(recorded[1])
                stager.until(lambda: _said_then_hung_up(replayed), "the replay to be refused")
            coming.result().send(b"the real one goes on")
            stager.until(lambda: carry() or bool(stager.messages))


def _said_then_hung_up(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_a_second_job_is_refused_while_the_first_lives(
    stager: TurnedStager, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "_BUSY_SECONDS_MAX", 0.2)
    rank = _joined(stager, threads)
    second = threads.submit(_connect, stager.port_number, launch="other", incarnation=b"2" * 16)
    beating = threading.Event()

    def refused() -> bool:
        if not beating.is_set():
            rank.send(b"alive")
        return second.done()

    stager.until(refused)
    beating.set()
    assert "serves another job, of 1 ranks, which is alive" in _refused(stager, second, ConfigError)
    assert stager.lost == []


def test_a_job_of_another_launch_joins_once_the_first_is_gone(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    _joined(stager, threads).disconnect(0.0, lost=True)  # as when its process dies
    second = threads.submit(_connect, stager.port_number, launch="other", incarnation=b"2" * 16)
    stager.until(lambda: bool(stager.lost), "the first job to be left behind")
    stager.listener.close_job()
    port = stager.open_next()
    stager.until(second.done)
    assert port.launch == "other"
    second.result()


def test_a_restart_of_the_same_launch_takes_over_at_once_and_the_old_one_stays_out(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    old = _joined(stager, threads)
    restarted = threads.submit(_connect, stager.port_number, incarnation=b"2" * 16)
    stager.until(lambda: bool(stager.lost), "the old one to be left behind")
    assert "started again" in stager.lost[0][1]
    stager.listener.close_job()
    port = stager.open_next()
    stager.until(restarted.done)
    new = restarted.result()
    # The old process was frozen all the time, and wakes up: its connection and its place are gone.
    with pytest.raises(PeerLost, match="job is over, or was started again without it"):
        _turn_until_raised(stager, old)
    late = threads.submit(_connect, stager.port_number)
    assert "started again without it" in _refused(stager, late, PeerLost)
    new.send(b"the new one goes on")
    stager.until(lambda: bool(stager.messages))
    assert stager.messages == [(0, b"the new one goes on")]
    assert stager.port is port


def test_ranks_that_come_again_replace_their_own_generation_and_the_others_hear_that_it_is_over(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    first = threads.submit(_connect, stager.port_number, rank=0, ranks=2)
    second = threads.submit(_connect, stager.port_number, rank=1, ranks=2)
    stager.open_next()
    stager.until(lambda: first.done() and second.done())
    again = threads.submit(_connect, stager.port_number, rank=0, ranks=2, generation=1)
    stager.until(lambda: len(stager.lost) == 2, "the generation before to end")
    assert "ranks of it come again" in stager.lost[0][1]
    stager.listener.close_job()
    port = stager.open_next()
    assert port.generation == 1
    with pytest.raises(GenerationOver):
        _turn_until_raised(stager, second.result())
    too_early = threads.submit(_connect, stager.port_number, rank=1, ranks=2)
    _refused(stager, too_early, GenerationOver)
    other = threads.submit(_connect, stager.port_number, rank=1, ranks=2, generation=1)
    stager.until(lambda: again.done() and other.done())
    other.result().send(b"here again")
    stager.until(lambda: bool(stager.messages))
    assert stager.messages == [(1, b"here again")]


def test_a_generation_that_ended_with_its_ranks_may_be_followed_by_the_next(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    _joined(stager, threads).disconnect(0.0, lost=True)
    stager.until(lambda: bool(stager.lost), "the rank to be lost")
    stager.listener.close_job()
    again = threads.submit(_connect, stager.port_number, generation=1)
    stager.open_next()
    stager.until(again.done)
    again.result()


def test_a_rank_with_another_attempt_of_the_lead_comes_as_the_next_generation(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    coming = threads.submit(_connect, stager.port_number, ranks=2, lead_attempt=3)
    assert stager.open_next().lead_attempt == 3
    stager.until(coming.done)
    other = threads.submit(_connect, stager.port_number, rank=1, ranks=2, lead_attempt=4)
    stager.until(other.done)
    with pytest.raises(GenerationOver, match="attempt 3 is served here, and the lead has begun another one"):
        other.result()
    again = threads.submit(_connect, stager.port_number, rank=1, ranks=2, generation=1, lead_attempt=4)
    stager.until(lambda: bool(stager.lost))
    assert stager.open_next().lead_attempt == 4
    stager.until(again.done)
    for rank in (coming, again):
        rank.result().disconnect(0.0, lost=True)


def test_a_lead_admits_ranks_that_had_different_attempts_of_it(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    first = threads.submit(_connect, stager.port_number, ranks=2, generation=2, lead_attempt=3)
    stager.open_next().lead_attempt = 0  # as a stager that leads does
    other = threads.submit(_connect, stager.port_number, rank=1, ranks=2, generation=2, lead_attempt=4)
    stager.until(lambda: first.done() and other.done())
    for rank in (first, other):
        rank.result().disconnect(0.0, lost=True)


def test_ranks_that_were_replaced_by_their_launcher_never_come_again(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    old = _joined(stager, threads)
    restarted = threads.submit(_connect, stager.port_number, incarnation=b"2" * 16)
    stager.until(lambda: bool(stager.lost), "the old one to be left behind")
    stager.listener.close_job()
    stager.open_next()
    stager.until(restarted.done)
    with pytest.raises(StartReplaced):
        _turn_until_raised(stager, old)
    again = threads.submit(_connect, stager.port_number, generation=1)
    _refused(stager, again, StartReplaced)
    assert len(stager.lost) == 1, "the new start was disturbed"


def test_a_start_that_ended_before_its_launcher_began_the_next_one_stays_out(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    _joined(stager, threads).disconnect(0.0, lost=True)  # frozen, and declared lost
    stager.until(lambda: bool(stager.lost))
    stager.listener.close_job()
    restarted = threads.submit(_connect, stager.port_number, incarnation=b"2" * 16)
    stager.open_next()
    stager.until(restarted.done)
    again = threads.submit(_connect, stager.port_number, generation=1)
    _refused(stager, again, StartReplaced)


def test_ranks_that_come_again_never_replace_a_start_that_this_stager_serves(
    stager: TurnedStager, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This stager is new, and does not know which of the two starts is older."""
    monkeypatch.setattr(connecting, "_BUSY_SECONDS_MAX", 0.2)
    served = _joined(stager, threads)
    again = threads.submit(_connect, stager.port_number, incarnation=b"0" * 16, generation=3)

    def refused() -> bool:
        served.send(b"alive")
        return again.done()

    stager.until(refused)
    assert "serves another job" in _refused(stager, again, ConfigError)
    assert stager.lost == []


def test_a_rank_that_another_stager_has_admitted_is_not_resumed_where_others_of_its_job_are_served(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    """The other stager has counted the rank's messages: here one would be lost, or received twice."""
    with contextlib.closing(TurnedStager()) as before, cut_link(before.port_number) as link:
        coming = threads.submit(_connect, link.port, rank=0, ranks=2)
        before.open_next()
        before.until(coming.done)
        rank = coming.result()
        rank.send(b"counted by the stager before")
        before.until(lambda: bool(before.messages))
        first_here = threads.submit(_connect, stager.port_number, rank=1, ranks=2)
        stager.open_next()
        stager.until(first_here.done)
        link.turn_to(stager.port_number)
        with pytest.raises(GenerationOver):
            _turn_until_raised(stager, rank)
    assert stager.messages == []


def test_the_later_of_two_generations_that_wait_is_served(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    behind = threads.submit(_connect, stager.port_number, rank=0, ranks=2, generation=1)
    stager.until(lambda: stager.listener.next_job() is not None)
    ahead = threads.submit(_connect, stager.port_number, rank=1, ranks=2, generation=2)
    stager.until(behind.done, "the rank behind to be refused")
    _refused(stager, behind, GenerationOver)
    assert stager.open_next().generation == 2
    stager.until(ahead.done)
    ahead.result()


def _turn_until_raised(stager: TurnedStager, rank: TcpStagerPort) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline:
        stager.turn()
        rank.poll()
        time.sleep(0.001)


def test_a_stager_that_was_started_again_does_not_know_the_job(threads: ThreadPoolExecutor) -> None:
    first = TurnedStager()
    with cut_link(first.port_number) as link:
        rank = _joined(first, threads, link.port)
        with contextlib.closing(TurnedStager()) as second:
            link._target = second.port_number
            first.close()
            with pytest.raises(PeerLost, match="does not know its job"):
                _turn_until_raised(second, rank)


def test_another_number_of_ranks_is_refused_with_both_numbers(threads: ThreadPoolExecutor) -> None:
    with contextlib.closing(TurnedStager(ranks=4)) as stager:
        coming = threads.submit(_connect, stager.port_number, ranks=2, rank=1)
        assert "has 2 ranks, and this stager was started with --ranks 4" in _refused(
            stager, coming, ConfigError
        )


def test_no_stager_there_is_said_with_its_address(threads: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    with pytest.raises(
        PeerLost, match=f"127.0.0.1:{port} could not be reached within 0.5 s: Connection refused"
    ):
        _connect(port, seconds_max=0.5)


def test_a_withdrawn_slot_is_left_in_the_middle_of_a_payload(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    rank = _joined(stager, threads)
    assert stager.port is not None
    memory = bytearray(64 << 20)
    stager.port.post(0, 0, memoryview(memory), (Extent(0, len(memory)),))
    payload = b"\x01" * len(memory)
    handle = rank.send_payload(memoryview(payload), 0, [len(payload)])
    stager.until(lambda: memory[0] == 1, "the payload to begin")
    stager.port.cancel(0, 0)
    written = memory.count(1)
    assert written < len(memory)
    done = threads.submit(_wait_sent, rank, handle)
    stager.until(done.done)
    assert memory.count(1) == written
    assert stager.port.pop_received(0, 0) is None


def _wait_sent(rank: TcpStagerPort, handle: int) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not rank.is_sent(handle):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_rank_that_has_not_read_for_a_while_leaves_the_stager_nothing_to_spin_on(
    stager: TurnedStager, threads: ThreadPoolExecutor
) -> None:
    rank = _joined(stager, threads)
    assert stager.port is not None
    message, heard = bytes(1 << 20), 0
    for _ in range(16):  # more than the buffers of both ends hold
        stager.port.send(0, message)
    stager.turn()
    assert stager.port.unsent_to(0) > 0
    deadline = time.monotonic() + SECONDS_MAX
    while heard < 16 or stager.port.unsent_to(0):
        assert time.monotonic() < deadline
        heard += len(rank.poll())
        stager.turn()
    for _ in range(20):  # read the rest of the payloads' connections
        stager.turn()
        time.sleep(0.01)
    assert not stager.reactor.run_once()


def test_leaving_is_no_loss(stager: TurnedStager, threads: ThreadPoolExecutor) -> None:
    rank = _joined(stager, threads)
    leaving = threads.submit(rank.disconnect, 10.0)
    stager.until(lambda: bool(stager.messages))
    assert stager.port is not None
    stager.port.mark_left(0)
    stager.until(leaving.done)
    deadline = time.monotonic() + 1.5 * _RECONNECT_SECONDS
    while time.monotonic() < deadline:
        stager.turn()
        time.sleep(0.01)
    assert stager.lost == []


# -- TLS ---------------------------------------------------------------------------------------------------------------


def test_a_certificate_of_another_authority_is_named_with_what_to_do(
    threads: ThreadPoolExecutor, authority: TestAuthority, tmp_path: Path
) -> None:
    other = TestAuthority(tmp_path, "other")
    with contextlib.closing(TurnedStager(tls=_tls(authority.sign("stager")))) as stager:
        coming = threads.submit(_connect, stager.port_number, tls_ca=other.cert)
        said = _refused(stager, coming, ConfigError)
        assert f"the certificate of the stager at 127.0.0.1:{stager.port_number} is not accepted" in said
        assert "unable to get local issuer certificate; HOLDFAST_TLS_CA must name" in said
        assert said.endswith(f"and names {other.cert}")
        assert stager.listener.next_job() is None


def test_a_certificate_that_has_expired_is_renewed_without_a_restart(
    threads: ThreadPoolExecutor, authority: TestAuthority
) -> None:
    pair = authority.sign("stager", days=0)
    with contextlib.closing(TurnedStager(tls=_tls(pair))) as stager:
        coming = threads.submit(_connect, stager.port_number, tls_ca=authority.cert)
        said = _refused(stager, coming, ConfigError)
        assert (
            "is not accepted: certificate has expired; write a new one into the stager's file --tls-cert"
            in said
        )
        pair.cert.write_text("half of it")
        coming = threads.submit(_connect, stager.port_number, tls_ca=authority.cert)
        assert "has expired" in _refused(stager, coming, ConfigError)
        assert authority.sign("stager") == pair  # the same files
        _joined(stager, threads, tls_ca=authority.cert).send(b"inside")
        stager.until(lambda: bool(stager.messages))
    assert stager.messages == [(0, b"inside")]


def test_a_certificate_for_another_host_is_refused(
    threads: ThreadPoolExecutor, authority: TestAuthority
) -> None:
    with contextlib.closing(TurnedStager(tls=_tls(authority.sign("stager", "10.0.0.7")))) as stager:
        coming = threads.submit(_connect, stager.port_number, tls_ca=authority.cert)
        said = _refused(stager, coming, ConfigError)
    assert "certificate is not valid for '127.0.0.1'; give HOLDFAST_STAGER the name" in said


def test_a_rank_without_tls_hears_that_the_stager_has_it(
    threads: ThreadPoolExecutor, authority: TestAuthority
) -> None:
    with contextlib.closing(TurnedStager(tls=_tls(authority.sign("stager")))) as stager:
        coming = threads.submit(_connect, stager.port_number)
        said = _refused(stager, coming, ConfigError)
    assert f"the stager at 127.0.0.1:{stager.port_number} takes connections with TLS alone" in said
    assert "HOLDFAST_TLS_CA" in said


def test_a_rank_with_tls_hears_that_the_stager_has_none(
    stager: TurnedStager, threads: ThreadPoolExecutor, authority: TestAuthority
) -> None:
    coming = threads.submit(_connect, stager.port_number, tls_ca=authority.cert)
    said = _refused(stager, coming, ConfigError)
    assert (
        f"the stager at 127.0.0.1:{stager.port_number} does not speak TLS, and this rank has tls_ca" in said
    )
    assert "start the stager with --tls-cert and --tls-key, or unset HOLDFAST_TLS_CA" in said


def test_a_key_is_proved_within_tls_too(threads: ThreadPoolExecutor, authority: TestAuthority) -> None:
    with contextlib.closing(TurnedStager(tls=_tls(authority.sign("stager")))) as stager:
        coming = threads.submit(_connect, stager.port_number, key=b"x" * 32, tls_ca=authority.cert)
        assert "another key" in _refused(stager, coming, ConfigError)


def test_tls_traffic_cannot_be_read_on_the_way(threads: ThreadPoolExecutor, authority: TestAuthority) -> None:
    secret = b"weights of a model " * 50
    with (
        contextlib.closing(TurnedStager(tls=_tls(authority.sign("stager")))) as stager,
        cut_link(stager.port_number) as link,
    ):
        link.keep_bytes()
        rank = _joined(stager, threads, link.port, tls_ca=authority.cert)
        assert stager.port is not None
        memory = bytearray(len(secret))
        stager.port.post(0, 0, memoryview(memory), (Extent(0, len(memory)),))
        rank.send(secret)
        sent = threads.submit(_wait_sent, rank, rank.send_payload(memoryview(secret), 0, [len(secret)]))
        stager.until(lambda: sent.done() and bool(stager.messages))
        assert memory == secret
        assert stager.messages == [(0, secret)]
        assert len(link.kept) > 2 * len(secret)
        assert b"weights" not in link.kept
        assert b"HOLDFAST" not in link.kept


def test_strangers_at_a_stager_with_tls_cost_the_ranks_nothing(
    threads: ThreadPoolExecutor, authority: TestAuthority
) -> None:
    with contextlib.closing(TurnedStager(tls=_tls(authority.sign("stager")))) as stager:
        strangers = [socket.create_connection(("127.0.0.1", stager.port_number)) for _ in range(300)]
        said = (
            b"",
            b"\xff" * 200,
            b"\x16\x03\x01\xff\xff" + b"\x00" * 500,
            b"GET / HTTP/1.1\r\n\r\n",
            b"HOLD",
        )
        for number, stranger in enumerate(strangers):
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.send(said[number % len(said)])
            stager.turn()
        _joined(stager, threads, tls_ca=authority.cert).send(b"still served")
        stager.until(lambda: bool(stager.messages))
        for stranger in strangers:
            stranger.close()
        for _ in range(20):
            stager.turn()
            time.sleep(0.01)
        assert not stager.reactor.run_once()  # nothing is left to spin on


@pytest.mark.parametrize("wrong", ["absent", "other key", "no pem"])
def test_a_certificate_that_cannot_be_used_is_named(
    authority: TestAuthority, tmp_path: Path, wrong: str
) -> None:
    pair = authority.sign("stager")
    cert, key = pair.cert, pair.key
    if wrong == "absent":
        cert = tmp_path / "absent.pem"
    elif wrong == "other key":
        key = authority.sign("other").key
    else:
        cert.write_text("no certificate")
    with pytest.raises(ConfigError, match=f"tls_cert and tls_key: {cert}"):
        StagerTls(cert, key)
    with pytest.raises(ConfigError, match="trainer setting tls_ca: "):
        RankTls(tmp_path / "absent.pem")
