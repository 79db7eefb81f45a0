"""Real sockets: any number of watchers get answers, and none of them can do harm."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import PeerLost, ProtocolError
from holdfast.ring.doorbell import MESSAGE_BYTES_MAX, VERSION, Channel, Listener, Message, connect
from holdfast.telemetry import status_socket as desk
from holdfast.telemetry.status_document import (
    RANKS_MAX,
    CheckpointStatus,
    RankStatus,
    StatusDocument,
    StatusLine,
    read_status,
)
from holdfast.telemetry.status_socket import request_status, serve_status, shrink_to_fit, socket_path

SECONDS_MAX = 30.0


class Speaker:
    """Counts how often it is asked what there is to say."""

    def __init__(self) -> None:
        self.asked = self.lines = 0

    def __call__(self) -> StatusDocument:
        self.asked += 1
        lines = tuple(StatusLine(at_unix=1.0, event="bad", text="x" * 1000) for _ in range(self.lines))
        return StatusDocument(
            role="flusher",
            run="s3://bucket/run",
            pid=os.getpid(),
            since_unix=1.0,
            now_unix=2.0,
            problems=lines,
        )


@pytest.fixture
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture
def path(tmp_path: Path, speaker: Speaker) -> Iterator[Path]:
    with serve_status(tmp_path, "flusher", speaker):
        yield socket_path(tmp_path, "flusher")
    assert list(tmp_path.iterdir()) == [], "the socket is taken away"


def send_for_ever(connection: socket.socket, packet: bytes) -> None:
    """And read nothing."""
    while True:
        connection.send(packet, socket.MSG_NOSIGNAL)


def wait_closed(channel: Channel) -> None:
    """Until the other side has hung up; what it says meanwhile is read."""
    deadline = time.monotonic() + SECONDS_MAX
    while not channel.closed:
        assert time.monotonic() < deadline, "not hung up on"
        select.select([channel], [], [], 1.0)
        channel.poll()


def test_watchers_of_one_moment_all_get_one_answer(
    path: Path, speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "_SAME_ANSWER_SECONDS", 3600.0)
    answers = [request_status(path, seconds_max=SECONDS_MAX) for _ in range(50)]
    assert all(answer == answers[0] and answer is not None for answer in answers)
    assert speaker.asked == 1


def test_another_process_is_answered(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from holdfast.telemetry.status_socket import request_status;"
        "print(request_status(Path(sys.argv[1]), seconds_max=30).run)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "s3://bucket/run"


def test_a_watcher_that_never_reads_is_hung_up_on_and_others_are_answered(
    path: Path, speaker: Speaker
) -> None:
    speaker.lines = 16  # of a length that fills the socket soon
    with contextlib.closing(connect(path)) as greedy:
        greedy._socket.settimeout(SECONDS_MAX)
        packet = Message("status", {"version": 1}).to_bytes()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_for_ever(greedy._socket, packet)
    assert request_status(path, seconds_max=SECONDS_MAX) is not None


@pytest.mark.parametrize("kind", ["hello", "finish"])
def test_a_watcher_that_says_anything_else_is_hung_up_on(path: Path, kind: str) -> None:
    with contextlib.closing(connect(path)) as stranger:
        hello = {"version": VERSION, "pid": 1, "attempt": 0, "share": [0, 1], "lead_attempt": 0}
        fields = hello if kind == "hello" else {}
        stranger.send(kind, **fields)
        wait_closed(stranger)
    assert request_status(path, seconds_max=SECONDS_MAX) is not None


def test_the_watcher_that_asked_longest_ago_goes_when_there_are_too_many(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "_WATCHERS_MAX", 2)
    with contextlib.closing(connect(path)) as first, contextlib.closing(connect(path)) as second:
        for channel in (second, first):  # both are accepted, and the second has asked longest ago
            channel.send("status", version=1)
            select.select([channel], [], [], SECONDS_MAX)
            assert [message.kind for message in channel.poll()] == ["state"]
        assert request_status(path, seconds_max=SECONDS_MAX) is not None
        wait_closed(second)
        assert first.poll() == []
        assert not first.closed


def test_a_bug_in_what_is_said_ends_the_answers_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> StatusDocument:
        raise KeyError("a bug")

    with serve_status(tmp_path, "stager", broken):
        assert request_status(socket_path(tmp_path, "stager"), seconds_max=SECONDS_MAX) is None
    assert "no longer answered" in caplog.text


def test_where_no_socket_can_be_made_the_role_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_status(tmp_path / "gone", "stager", Speaker()):
        pass
    assert "cannot ask this stager" in caplog.text


def test_asking_where_no_process_is_gives_none_and_a_silent_one_raises(tmp_path: Path) -> None:
    path = socket_path(tmp_path, "stager")
    assert request_status(path, seconds_max=1.0) is None
    assert request_status(tmp_path / "gone" / "flusher-status.sock", seconds_max=1.0) is None
    with contextlib.closing(Listener(path)), pytest.raises(PeerLost, match=r"does not answer within 0\.05 s"):
        request_status(path, seconds_max=0.05)
    Listener(path)._socket.close()  # as a process that was killed leaves it
    assert path.exists()
    assert request_status(path, seconds_max=1.0) is None


def test_the_largest_answer_fits_a_packet_and_keeps_what_matters_most() -> None:
    text = "\u00fc" * 300
    said = StatusDocument(
        role="stager",
        run="r",
        pid=1,
        since_unix=1.0,
        now_unix=1.0,
        ranks_total=5000,
        ranks=tuple(RankStatus(rank=rank, host=text) for rank in range(RANKS_MAX)),
        checkpoints=tuple(
            CheckpointStatus(attempt=1, step=step, held=text, failed=text) for step in range(64)
        ),
        problems=tuple(StatusLine(at_unix=1.0, event="failed", text=text) for _ in range(16)),
    )
    document = shrink_to_fit(said.model_dump(mode="json"))
    assert len(Message("state", {"document": document}).to_bytes()) <= MESSAGE_BYTES_MAX
    found = read_status(json.loads(json.dumps(document)), "here")
    assert found.ranks[0].rank == 0
    assert found.checkpoints[-1].step == 63
    assert 1 < len(found.checkpoints) < 64


def test_a_newer_version_may_say_more_and_nonsense_is_refused() -> None:
    document = Speaker()().model_dump(mode="json")
    assert read_status({**document, "mood": "good"}, "here").pid == os.getpid()
    for wrong in ({"pid": -1}, {"ranks": "all"}, {"version": 2}, {"now_unix": "soon"}):
        with pytest.raises(ProtocolError, match="here: this version does not understand"):
            read_status({**document, **wrong}, "here")
