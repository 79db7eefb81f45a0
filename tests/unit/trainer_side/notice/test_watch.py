"""The watch's thread: news is passed on once, a fault is reported once, and a signal wakes the thread."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from holdfast.notices.notice import Notice, NoticeKind
from tests.support.fake_metadata import AWS_ACTION, AWS_TOKEN, FakeMetadata
from trainer_side.notice.open_sources import open_watch
from trainer_side.notice.watch import NoticeWatch, SourceError, is_first_on_machine

_SECONDS_MAX = 60.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


class Source:
    """Returns the value set by the test, or raises it."""

    name = "test"

    def __init__(self) -> None:
        self.said: list[Notice] | Exception = []

    def poll(self) -> list[Notice]:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


def test_each_notice_is_passed_on_once_however_often_it_stands_there() -> None:
    source, heard = Source(), list[Notice]()
    watch = NoticeWatch(
        lambda: [source], heard.append, rank=0, seconds=0.001, signals=(), wakes=SimpleQueue()
    )
    watch.start()
    rebalance = Notice(NoticeKind.REBALANCE, None, "test", "of 08:22")
    terminate = Notice(NoticeKind.TERMINATE, 1000.0, "test")
    until(lambda: watch.polls.get("test", 0) > 3)
    source.said = [rebalance]
    until(lambda: heard)
    source.said = [rebalance, terminate]
    until(lambda: len(heard) == 2)
    looks = watch.polls["test"]
    until(lambda: watch.polls["test"] > looks + 5)
    assert heard == [rebalance, terminate]
    source.said = [Notice(NoticeKind.REBALANCE, None, "test", "of 09:00")]
    until(lambda: len(heard) == 3)
    watch.close()
    looks = watch.polls["test"]
    time.sleep(0.01)
    assert watch.polls["test"] == looks


@pytest.mark.parametrize("error", [SourceError("no answer"), ZeroDivisionError("a bug")])
def test_a_source_that_cannot_be_asked_is_said_once_and_again_when_it_is_back(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    source, heard = Source(), list[Notice]()
    source.said = error
    with caplog.at_level(logging.WARNING):
        watch = NoticeWatch(
            lambda: [source], heard.append, rank=3, seconds=0.001, signals=(), wakes=SimpleQueue()
        )
        watch.start()
        until(lambda: watch.failures.get("test", 0) > 5)
        source.said = []
        until(lambda: "reaches test again" in caplog.text)
        watch.close()
    assert caplog.text.count("cannot ask test") == 1
    assert str(error) in caplog.text
    assert caplog.text.count("reaches test again") == 1


def test_a_signal_is_passed_on_without_waiting_for_the_next_look() -> None:
    heard = list[Notice]()
    config = TrainerConfig(watch=("sigusr1",), watch_seconds=3600, watch_grace_seconds=7)
    watching = open_watch(config, heard.append, rank=0, environ={})
    assert watching is not None
    until(lambda: watching.polls.get("sigusr1", 0) == 1)
    before = time.time()
    os.kill(os.getpid(), signal.SIGUSR1)
    until(lambda: heard)
    watching.close()
    (notice,) = heard
    assert notice.deadline_unix is not None
    assert before + 7 <= notice.deadline_unix <= time.time() + 7


def test_off_unless_configured_and_one_rank_of_a_machine_asks() -> None:
    assert TrainerConfig().watch == ()
    assert open_watch(TrainerConfig(), lambda _: None, rank=0) is None
    assert is_first_on_machine({})
    assert is_first_on_machine({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "SLURM_LOCALID": "3"})
    assert not is_first_on_machine({"OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    assert not is_first_on_machine({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"})  # torchrun under srun
    with FakeMetadata() as server:
        config = TrainerConfig(watch=("aws",), watch_seconds=0.001)
        other = open_watch(config, lambda _: None, rank=1, environ={**server.environ, "SLURM_LOCALID": "1"})
        first = open_watch(config, lambda _: None, rank=0, environ={**server.environ, "SLURM_LOCALID": "0"})
        assert first is not None
        assert other is not None
        until(lambda: server.asked[AWS_ACTION] > 2)
        assert other.polls == {}
        assert server.asked[AWS_TOKEN] == 1
        first.close()
        other.close()


def test_settings_are_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_WATCH", "aws, sigterm")
    assert TrainerConfig.from_sources().watch == ("aws", "sigterm")
    monkeypatch.setenv("HOLDFAST_WATCH", "azur")
    with pytest.raises(ConfigError, match="watch"):
        TrainerConfig.from_sources()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ()),
        ({"TORCHELASTIC_RUN_ID": "none"}, ("sigterm",)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ("sigterm",)),
        ({"TORCHELASTIC_RUN_ID": "none", "HOLDFAST_WATCH": ""}, ()),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOLDFAST_WATCH": "aws"}, ("aws",)),
    ],
)
def test_sigterm_is_watched_under_torchrun_and_in_pods_unless_the_setting_says_otherwise(
    environ: dict[str, str],
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_RUN_ID", "KUBERNETES_SERVICE_HOST", "HOLDFAST_WATCH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert TrainerConfig.from_sources().watch == expected
    if "HOLDFAST_WATCH" not in environ:
        (tmp_path / "holdfast.toml").write_text("[trainer]\nwatch = []\n")
        assert TrainerConfig.from_sources().watch == ()


def test_a_signal_outside_the_main_thread_is_said_and_the_rest_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    opened = []
    thread = threading.Thread(
        target=lambda: opened.append(open_watch(TrainerConfig(watch=("sigusr1",)), lambda _: None, rank=0))
    )
    thread.start()
    thread.join()
    assert "sigusr1 is not watched" in caplog.text
    assert signal.getsignal(signal.SIGUSR1) == before
    assert opened[0] is not None
    opened[0].close()


def test_a_server_whose_address_is_none_is_said(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "169.254.169.254"}
    watching = open_watch(TrainerConfig(watch=("aws",)), lambda _: None, rank=0, environ=environ)
    assert watching is not None
    until(lambda: "only signals are" in caplog.text)
    watching.close()
