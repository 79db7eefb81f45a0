"""Finding and starting the flusher, against real processes, some of which misbehave."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.config import StagerConfig
from holdfast.errors import ConfigError, FencedError, HoldfastError, PeerLost
from holdfast.image.manifest import manifest_name
from holdfast.ring.directory import make_private_directory, runtime_directory
from holdfast.ring.doorbell import SOCKET_NAME, Listener
from holdfast.store import open_store
from stager import flusher_process
from stager.flusher_process import Flusher, PreloadedFlusher, attach
from tests.support.checkpoints import manifest_of, small_image

_LOADED_BYTES = 40 << 20  # a Python with all modules of a flusher has more, an empty one less


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StagerConfig:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return StagerConfig(
        store=str(tmp_path / "store"),
        chunk_bytes=65536,
        ring_bytes=1 << 20,
        runtime_dir=tmp_path / "runtime",
        start_seconds_max=60,
    )


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Every flusher that a test started has ended after it."""
    yield
    while flusher_process._started:
        flusher_process._started.popitem()[0].wait(60)


@pytest.fixture
def flusher(config: StagerConfig) -> Iterator[Flusher]:
    found = attach(config)
    yield found
    if not found.channel.closed:
        found.channel.send("finish")
    found.close()


def test_a_started_flusher_serves_and_is_outside_of_the_job(
    config: StagerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    monkeypatch.setenv("PMIX_RANK", "2")
    found = attach(config)
    try:
        process = psutil.Process(found.pid)
        assert os.getsid(found.pid) == found.pid != os.getsid(0)
        assert not [name for name in process.environ() if name.startswith(("OMPI_", "PMIX_", "PRTE_"))]
        assert (found.ring.chunk_bytes, found.ring.ring_chunks, found.attempt) == (65536, 16, 1)
        assert Path(f"/proc/{found.pid}/fd/0").readlink() == Path("/dev/null")
        found.channel.send("finish")
        deadline = time.monotonic() + 60
        heard: list[str] = []
        while "drained" not in heard and time.monotonic() < deadline:
            heard += [message.kind for message in found.channel.poll()]
            time.sleep(0.01)
        assert "drained" in heard
    finally:
        found.close()


def test_a_flusher_that_was_started_ahead_touches_nothing_and_is_the_one_that_serves(
    config: StagerConfig, tmp_path: Path
) -> None:
    preloaded = PreloadedFlusher(config)
    pid = preloaded.pid
    assert pid is not None
    try:
        process = psutil.Process(pid)
        assert os.getsid(pid) == pid != os.getsid(0)
        deadline = time.monotonic() + 60
        while process.memory_info().rss < _LOADED_BYTES or process.status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < deadline, "it does not come to wait"
            time.sleep(0.01)
        assert [path.name for path in tmp_path.iterdir()] == ["state"]
        found = attach(config, preloaded=preloaded)
        assert (found.pid, preloaded.pid) == (pid, None)
        assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")
        found.channel.send("finish")
        found.close()
    finally:
        preloaded.close()


def test_a_flusher_that_was_started_ahead_ends_where_another_one_serves(config: StagerConfig) -> None:
    lingering = config.model_copy(update={"linger": True})
    preloaded = PreloadedFlusher(lingering)
    pid = preloaded.pid
    assert pid is not None
    waiting = psutil.Process(pid)
    first = attach(lingering)
    assert PreloadedFlusher(lingering).pid is None
    first.channel.send("finish")
    first.close()
    found = attach(lingering, preloaded=preloaded)
    try:
        assert (found.pid, preloaded.pid) == (first.pid, None)
        assert not waiting.is_running()
    finally:
        found.close()
        os.kill(first.pid, signal.SIGTERM)


_STARTED = """
import sys, time
from holdfast.config import StagerConfig
from stager.flusher_process import PreloadedFlusher
preloaded = PreloadedFlusher(StagerConfig(store=sys.argv[1], runtime_dir=sys.argv[2]))
print(preloaded.pid, flush=True)
time.sleep(60)
"""


def test_a_flusher_that_was_started_ahead_ends_with_its_stager(config: StagerConfig) -> None:
    stager = subprocess.Popen(
        [sys.executable, "-c", _STARTED, config.store, str(config.runtime_dir)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stager.stdout is not None
    with stager.stdout as said:
        waiting = psutil.Process(int(said.readline()))
    stager.kill()
    stager.wait()
    assert psutil.wait_procs([waiting], 60)[1] == []
    assert not Path(config.store).exists()


def _geometry(config: StagerConfig) -> tuple[int, int]:
    """The directory of the ring that a flusher with these settings serves."""
    found = attach(config)
    try:
        found.channel.send("finish")
        return found.ring.chunk_bytes, found.ring.ring_chunks
    finally:
        found.close()
        flusher_process._started.popitem()[0].wait(60)


def test_the_newest_checkpoint_says_how_large_chunks_of_a_new_ring_are(config: StagerConfig) -> None:
    unsaid = config.model_copy(update={"chunk_bytes": None, "ring_bytes": None})
    assert _geometry(unsaid) == (16 << 20, 16)
    store = open_store(unsaid.store)
    for step, image_bytes in ((1, 10**11 - 1), (2, 10**11)):
        crcs = (0,) * -(-image_bytes // (1 << 30))
        manifest = manifest_of(
            small_image(), step=step, image_bytes=image_bytes, chunk_bytes=1 << 30, chunk_crc32s=crcs
        )
        # Of the file nothing is read, nor is it there: the manifest says that it was verified.
        store.write(manifest_name(manifest.file), manifest.to_bytes())
    store.write("step-000000003.json", b"not a manifest")
    assert _geometry(unsaid) == (64 << 20, 8), "the newest that can be read"


def test_a_ring_that_is_there_keeps_its_chunks_unless_others_are_set(config: StagerConfig) -> None:
    unsaid = config.model_copy(update={"chunk_bytes": None, "ring_bytes": None})
    for settings in (config, unsaid):
        found = attach(settings)
        assert (found.ring.chunk_bytes, found.ring.ring_chunks) == (65536, 16)
        os.kill(found.pid, signal.SIGKILL)
        found.close()
        flusher_process._started.popitem()[0].wait(60)
        assert (runtime_directory(unsaid.store, unsaid.runtime_dir) / "ring").exists()


def test_a_second_stager_is_refused(config: StagerConfig, flusher: Flusher) -> None:
    with pytest.raises(FencedError, match=str(os.getpid())):
        attach(config)


def test_a_store_that_takes_no_writes_is_the_stagers_error(config: StagerConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    bad = config.model_copy(update={"store": str(tmp_path / "file" / "run")})
    with pytest.raises(HoldfastError, match="file") as caught:
        attach(bad)
    assert not isinstance(caught.value, PeerLost)


@pytest.fixture
def impostor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a program that is started instead of the flusher; the test writes its code."""
    program = tmp_path / "impostor"
    monkeypatch.setattr(sys, "executable", str(program))
    return program


def _write(program: Path, code: str) -> None:
    program.write_text(f"#!{os.path.realpath('/proc/self/exe')}\nimport json, os, sys, time\n{code}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_a_flusher_that_dies_without_a_word_shows_its_last_ones(config: StagerConfig, impostor: Path) -> None:
    _write(impostor, "print('out of memory, sorry', file=sys.stderr); sys.exit(13)")
    with pytest.raises(PeerLost, match="exit code 13") as caught:
        attach(config)
    assert "out of memory, sorry" in str(caught.value)


def test_a_flusher_that_says_nothing_is_ended(config: StagerConfig, impostor: Path, tmp_path: Path) -> None:
    _write(impostor, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    with pytest.raises(PeerLost, match="not ready within 1 s"):
        attach(config.model_copy(update={"start_seconds_max": 1.0}))
    if (tmp_path / "pid").exists():  # it may not have come even so far
        assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("line", ["[]", "nonsense", "{}", '{"ready": 1}'])
def test_a_flusher_that_talks_nonsense_is_an_error(config: StagerConfig, impostor: Path, line: str) -> None:
    _write(impostor, f"print({line!r}); sys.exit(0)")
    with pytest.raises(PeerLost, match="exit code 0"):
        attach(config)


def test_the_error_it_reports_is_raised(config: StagerConfig, impostor: Path) -> None:
    _write(impostor, "print(json.dumps({'error': {'code': 'config', 'message': 'no room'}})); sys.exit(2)")
    with pytest.raises(ConfigError, match="no room"):
        attach(config)


def test_a_flusher_that_hangs_up_is_noticed(config: StagerConfig) -> None:
    """It dies between being ready and answering hello."""
    found = attach(config)
    os.kill(found.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not found.channel.closed and time.monotonic() < deadline:
        found.channel.poll()
        time.sleep(0.01)
    assert found.channel.closed
    found.close()


@pytest.mark.parametrize("times", [1, 2])
def test_a_flusher_that_ends_just_as_the_stager_comes_is_replaced(
    config: StagerConfig, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Its socket takes the connection, and nobody answers. If the one that was started does so, too, that is all."""
    directory = runtime_directory(config.store, config.runtime_dir)
    make_private_directory(directory)
    listener = Listener(directory / SOCKET_NAME)
    ends = threading.Thread(target=_take_and_end, args=(listener,))
    ends.start()
    if times == 1:
        found = attach(config)
        assert found.attempt == 1
        found.channel.send("finish")
        found.close()
    else:
        again: list[threading.Thread] = []

        def start(config: StagerConfig, deadline: float, preloaded: PreloadedFlusher | None) -> None:
            ends.join()
            again.append(threading.Thread(target=_take_and_end, args=(Listener(directory / SOCKET_NAME),)))
            again[0].start()

        monkeypatch.setattr(flusher_process, "_start_flusher", start)
        with pytest.raises(PeerLost, match="that was started hung up before it answered"):
            attach(config)
        again[0].join()
    ends.join()


def _take_and_end(listener: Listener) -> None:
    deadline = time.monotonic() + 60
    while (channel := listener.accept()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    listener.close()
    channel.close()


def test_a_flusher_that_has_ended_leaves_no_zombie(config: StagerConfig) -> None:
    found = attach(config)
    os.kill(found.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(found.pid) and time.monotonic() < deadline:
        flusher_process.reap()
        time.sleep(0.01)
    assert not psutil.pid_exists(found.pid)
    found.close()
