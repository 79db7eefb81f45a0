"""Each cloud's source against a real small metadata server, with every possible answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.notices.notice import NoticeKind
from tests.support.fake_metadata import (
    AWS_ACTION,
    AWS_REBALANCE,
    AWS_TOKEN,
    AZURE_EVENTS,
    GCP_PREEMPTED,
    FakeMetadata,
)
from trainer_side.notice import open_sources as opening
from trainer_side.notice.aws import Aws
from trainer_side.notice.azure import Azure
from trainer_side.notice.gcp import Gcp
from trainer_side.notice.http import MetadataServer
from trainer_side.notice.open_sources import find_servers
from trainer_side.notice.signals import SignalSource
from trainer_side.notice.watch import SourceError

_SECONDS_MAX = 0.5  # of a question, where the server is to be slower than that


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of this process answers at once, but on a busy machine that may take seconds."""
    for cloud in (Aws, Gcp, Azure):
        monkeypatch.setitem(cast(Any, cloud.__init__).__kwdefaults__, "seconds_max", 60.0)
    for name in ("_ANSWER_SECONDS_MAX", "_DETECT_SECONDS_MAX"):
        monkeypatch.setattr(opening, name, 60.0)


@pytest.fixture
def server() -> Iterator[FakeMetadata]:
    with FakeMetadata() as running:
        yield running


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Nobody listens there, nor can anybody else begin to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


# -- AWS


def test_aws_without_a_notice_says_nothing_and_keeps_its_token(server: FakeMetadata) -> None:
    aws = Aws(server.environ)
    assert [aws.poll() for _ in range(3)] == [[], [], []]
    assert server.asked == {AWS_TOKEN: 1, AWS_ACTION: 3, AWS_REBALANCE: 3}
    assert server.headers[AWS_TOKEN]["x-aws-ec2-metadata-token-ttl-seconds"] == "3600"


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_an_instance_action_is_a_deadline(server: FakeMetadata, action: str) -> None:
    at = server.interrupt(120, action)
    (notice,) = Aws(server.environ).poll()
    assert (notice.kind, notice.deadline_unix, notice.source) == (NoticeKind.TERMINATE, at, "aws")
    assert action in notice.said_by


def test_a_rebalance_has_no_deadline_and_both_may_come(server: FakeMetadata) -> None:
    server.recommend()
    (notice,) = Aws(server.environ).poll()
    assert (notice.kind, notice.deadline_unix) == (NoticeKind.REBALANCE, None)
    server.interrupt(120)
    assert [found.kind for found in Aws(server.environ).poll()] == [
        NoticeKind.TERMINATE,
        NoticeKind.REBALANCE,
    ]


def test_the_graver_notice_is_not_held_back_by_the_other_question(server: FakeMetadata) -> None:
    server.interrupt(120)
    server.forced[AWS_REBALANCE] = (500, "", {})
    assert [found.kind for found in Aws(server.environ).poll()] == [NoticeKind.TERMINATE]


def test_a_token_is_renewed_before_it_ends(server: FakeMetadata) -> None:
    now = 0.0
    aws = Aws(server.environ, token_seconds=100, clock=lambda: now)
    aws.poll()
    now = 84.0
    aws.poll()
    assert server.tokens == 1
    now = 86.0  # 15 seconds before its end
    aws.poll()
    assert server.tokens == 2


def test_a_withdrawn_token_is_renewed_once(server: FakeMetadata) -> None:
    aws = Aws(server.environ)
    aws.poll()
    server.withdraw_tokens()
    assert aws.poll() == []
    assert server.tokens == 2


def test_a_server_that_refuses_every_token_is_asked_for_one_more_and_no_more(server: FakeMetadata) -> None:
    server.forced[AWS_ACTION] = (401, "", {})
    with pytest.raises(SourceError, match="answered 401"):
        Aws(server.environ).poll()
    assert server.asked == {AWS_TOKEN: 2, AWS_ACTION: 2}


@pytest.mark.parametrize(
    "said",
    [
        "",
        "null",
        "[]",
        "{}",
        "<html>",
        '{"action": "terminate"}',
        '{"action": "dance", "time": "2017-09-18T08:22:00Z"}',
        '{"action": "terminate", "time": "soon"}',
        '{"action": "terminate", "time": 7}',
        '{"action": "terminate", "time": "9999-99-99T99:99:99Z"}',
        "[" * 50_000,
        "x" * 100_000,
    ],
)
def test_garbage_is_an_error_of_ours(server: FakeMetadata, said: str) -> None:
    server.action = said
    with pytest.raises(SourceError):
        Aws(server.environ).poll()


def test_an_answer_without_end_is_not_read(server: FakeMetadata) -> None:
    server.interrupt(120)
    assert server.action is not None
    server.action = " " * 100_000 + server.action
    with pytest.raises(SourceError, match="at most 65536 bytes"):
        Aws(server.environ).poll()


def test_a_token_that_is_none_is_refused(server: FakeMetadata) -> None:
    for said in ("", "a\nHost: elsewhere", "x" * 2000):
        server.forced[AWS_TOKEN] = (200, said, {})
        with pytest.raises(SourceError, match="token"):
            Aws(server.environ).poll()
    server.forced[AWS_TOKEN] = (403, "", {})
    with pytest.raises(SourceError, match="hop limit"):
        Aws(server.environ).poll()


# -- the way there


def test_a_redirect_is_not_followed(server: FakeMetadata) -> None:
    with FakeMetadata() as elsewhere:
        elsewhere.interrupt(120)
        server.forced[AWS_TOKEN] = (307, "", {"Location": elsewhere.url + AWS_TOKEN})
        with pytest.raises(SourceError, match="redirect"):
            Aws(server.environ).poll()
        server.forced = {AWS_ACTION: (302, "", {"Location": elsewhere.url + AWS_ACTION})}
        with pytest.raises(SourceError, match="redirect"):
            Aws(server.environ).poll()
        assert not elsewhere.asked


def test_no_proxy_is_ever_asked(server: FakeMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeMetadata() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert Aws(server.environ).poll() == []
        assert Gcp(server.environ).poll() == []
        assert not proxy.asked
    assert server.asked[AWS_ACTION] == 1


@pytest.mark.parametrize("cloud", [Aws, Gcp, Azure])
def test_a_server_that_hangs_drips_refuses_or_fails_is_an_error(
    server: FakeMetadata, closed_port: int, cloud: type[Aws] | type[Gcp] | type[Azure]
) -> None:
    source = cloud(server.environ, seconds_max=_SECONDS_MAX)
    server.hanging.set()
    with pytest.raises(SourceError, match="did not send a whole answer within"):
        source.poll()
    server.hanging.clear()
    for path in (AWS_TOKEN, GCP_PREEMPTED, AZURE_EVENTS):
        server.forced[path] = (200, "x" * 1000, {})
    server.dripping = True
    with pytest.raises(SourceError, match="did not send a whole answer within"):
        source.poll()
    server.dripping = False
    for path in (AWS_TOKEN, GCP_PREEMPTED, AZURE_EVENTS):
        server.forced[path] = (503, "", {})
    with pytest.raises(SourceError, match="answered 503"):
        cloud(server.environ).poll()
    nobody = f"127.0.0.1:{closed_port}"
    environ = {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{nobody}",
        "GCE_METADATA_HOST": nobody,
        "HOLDFAST_AZURE_METADATA_URL": f"http://{nobody}",
    }
    with pytest.raises(SourceError, match="ConnectionRefused"):
        cloud(environ).poll()


@pytest.mark.parametrize(
    "url", ["", "169.254.169.254", "https://host", "ftp://host", "http://", "http://h:99999", "http://h?x"]
)
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(SourceError, match="expected http://HOST"):
        MetadataServer(url, seconds_max=1)


# -- Google Cloud


def test_gcp_counts_its_half_minute_from_when_it_was_first_seen(server: FakeMetadata) -> None:
    now = 1000.0
    gcp = Gcp(server.environ, clock=lambda: now)
    assert gcp.poll() == []
    server.preempted = "TRUE"
    (first,) = gcp.poll()
    now = 1010.0
    assert gcp.poll() == [first]
    assert (first.kind, first.deadline_unix) == (NoticeKind.TERMINATE, 1030.0)
    server.preempted = "maybe"
    with pytest.raises(SourceError, match="maybe"):
        gcp.poll()


# -- Azure


def _event(**fields: object) -> dict[str, object]:
    return {
        "EventId": "f00",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["trainer-0"],
        "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
        **fields,
    }


def test_azure_hears_a_preemption_of_this_machine_alone(server: FakeMetadata) -> None:
    azure = Azure(server.environ, clock=lambda: 5.0)
    assert azure.poll() == []
    server.events = [_event(EventType="Reboot"), _event(Resources=["trainer-1"])]
    assert azure.poll() == []
    server.events = [_event()]
    (notice,) = azure.poll()
    assert (notice.kind, notice.deadline_unix) == (NoticeKind.TERMINATE, 1474309787.0)
    server.events = [_event(NotBefore="")]  # it has begun
    assert [found.deadline_unix for found in azure.poll()] == [5.0]
    server.machine = ""
    server.events = [_event(Resources=["trainer-1"])]
    assert len(Azure(server.environ).poll()) == 1  # it does not know its name


@pytest.mark.parametrize(
    "said", ["", "{}", '{"Events": 7}', '{"Events": [7]}', json.dumps({"Events": [_event(NotBefore="x")]})]
)
def test_garbage_of_azure_is_an_error_of_ours(server: FakeMetadata, said: str) -> None:
    server.forced[AZURE_EVENTS] = (200, said, {})
    with pytest.raises(SourceError):
        Azure(server.environ).poll()


# -- which cloud


def test_auto_takes_the_first_cloud_that_answers(server: FakeMetadata) -> None:
    assert [source.name for source in find_servers(["auto"], server.environ)] == ["aws"]
    server.forced[AWS_TOKEN] = (404, "", {})
    assert [source.name for source in find_servers(["auto"], server.environ)] == ["gcp"]
    server.forced[GCP_PREEMPTED] = (404, "", {})
    assert [source.name for source in find_servers(["auto"], server.environ)] == ["azure"]
    server.machine = ""
    assert find_servers(["auto"], server.environ) == []


# -- signals

_TWICE = """
import os, signal, sys, time
from trainer_side.notice.signals import SignalSource
before = []
if sys.argv[1] == "own":
    signal.signal(signal.SIGTERM, lambda *_: before.append(1))
now = 100.0
source = SignalSource(signal.SIGTERM, grace_seconds=30, wake=lambda: None, clock=lambda: now)
assert source.poll() == []
os.kill(os.getpid(), signal.SIGTERM)
(notice,) = source.poll()
assert (notice.source, notice.deadline_unix, notice.kind) == ("sigterm", 130.0, "terminate")
print("alive", len(before), flush=True)
now += 1.0  # the same one, passed on by a launcher
os.kill(os.getpid(), signal.SIGTERM)
print("alive", len(before), flush=True)
now += 1.0
os.kill(os.getpid(), signal.SIGTERM)
print("still alive", len(before), flush=True)
"""


@pytest.mark.parametrize(
    ("handler", "code", "said"),
    [("none", -signal.SIGTERM, "alive 0\nalive 0\n"), ("own", 0, "alive 1\nalive 2\nstill alive 3\n")],
)
def test_the_first_sigterm_is_a_notice_and_the_second_does_what_it_always_did(
    handler: str, code: int, said: str, tmp_path: Path
) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", _TWICE, handler],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, said), done.stderr


def test_the_handler_stays_and_the_next_one_takes_its_place() -> None:
    """Without one SIGUSR1 would kill this process."""
    before, woken = signal.getsignal(signal.SIGUSR1), list[int]()
    try:
        first = SignalSource(signal.SIGUSR1, grace_seconds=1, wake=lambda: woken.append(1))
        first.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not first.poll()
        second = SignalSource(signal.SIGUSR1, grace_seconds=1, wake=lambda: woken.append(2))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (len(second.poll()), first.poll()) == (1, [])
        assert second._previous_handler == first._previous_handler == before
        second.close()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert woken == [2]
    finally:
        signal.signal(signal.SIGUSR1, before)


_LATE = """
import multiprocessing, os, signal, sys, time
from trainer_side.notice.signals import SignalSource

fork = multiprocessing.get_context("fork")
lives = fork.Event()

def hang() -> None:
    lives.set()
    sum(range(10**12))  # one call of C: Python's handlers wait for it

sources = [SignalSource(number, grace_seconds=1, wake=lambda: None) for number in (signal.SIGTERM, signal.SIGUSR1)]
child = fork.Process(target=hang)
child.start()
lives.wait(30)  # Python forgets the signals that reach a child before fork() has returned in it
os.kill(child.pid, signal.SIGUSR1)
child.terminate()  # as a loader ends its workers
child.join(10)
print("child", child.exitcode, flush=True)
child.kill()
os.kill(os.getpid(), signal.SIGTERM)
for source in sources:
    source.close()
os.kill(os.getpid(), signal.SIGTERM)  # the same one, passed on by a launcher
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR1)
print("lives", flush=True)
time.sleep(2.5)
os.kill(os.getpid(), signal.SIGTERM)
print("not reached", flush=True)
"""


def test_after_close_only_a_new_sigterm_ends_the_process_and_children_end_at_the_first(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LATE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"child {-signal.SIGTERM}\nlives\n"
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, said), done.stderr
