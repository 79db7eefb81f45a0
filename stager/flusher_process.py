"""Finds this run's flusher or starts one, and attaches to it.

    runtime directory has a socket that answers? ── no ─► python -m flusher, in a session of its own
                        │ yes                                  │ one line of JSON: ready, or its error
                        └──────────────► hello ─► welcome ◄────┘ ─► ring mapped, or the one we have kept

`PreloadedFlusher` starts the flusher before the ranks have joined: it loads its modules meanwhile, and touches neither
store nor ring until it is told to begin.

The flusher must outlive this MPI job: it has its own session (mpirun kills ours), no variables of the MPI launcher
(with them it would take itself for a rank), and its output goes to a file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.config import FlusherConfig, StagerConfig
from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.log_files import last_lines, log_path
from holdfast.process import count_oom_kills
from holdfast.ring import doorbell as ipc
from holdfast.ring.directory import runtime_directory
from holdfast.ring.ring import Ring
from holdfast.wire.failure_count import NO_FAILURES, FailureCount
from holdfast.wire.frames import peer_error
from stager.orphaned_rings import orphaned_rings

_log = logging.getLogger("holdfast.stager.flusher")

_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
_READY_LINE_BYTES_MAX = 64 * 1024
# Flusher processes for `reap`; they outlive us by design. The value: `count_oom_kills()` at the start of the process.
_started: dict[subprocess.Popen[bytes], int] = {}


class PreloadedFlusher:
    """A flusher process that has loaded its modules and waits for `begin`; it ends with this process.

    None is started if the run's flusher has a socket already. Main thread.
    """

    def __init__(self, config: StagerConfig) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(HoldfastError, OSError):  # `attach` will meet the same error and report it
            if not (_directory(config) / ipc.SOCKET_NAME).exists():
                self._process = _launch(config, ["ahead"], subprocess.PIPE)

    @property
    def pid(self) -> int | None:
        """Process id; None if no flusher waits."""
        return None if self._process is None else self._process.pid

    def begin(self, config: StagerConfig) -> subprocess.Popen[bytes] | None:
        """Tell the process to begin, with the settings that were not known when it was started; the caller owns it from
        now on. None if no flusher waits.
        """
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            options = f"--share {config.share}"
            if config.metrics_port is not None:
                options += f" --metrics-port {config.metrics_port}"
            # If the process has died, its output says why.
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(f"{options}\n".encode())
        return process

    def close(self) -> None:
        """Kill the process, unless it was told to begin."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


@dataclass
class Flusher:
    """The run's flusher, as this stager is attached to it. `resumed`: it kept the last flusher's ring and attempt.
    `prior_failures`: failures of the run before this attempt.
    """

    channel: ipc.Channel
    ring: Ring
    attempt: int
    store_url: str
    pid: int
    resumed: bool = False
    prior_failures: FailureCount = NO_FAILURES

    def close(self) -> None:
        """Detach; the flusher keeps running."""
        self.ring.close()  # first: when we hang up, the flusher checks whether we still hold the ring
        self.channel.close()


def attach(
    config: StagerConfig,
    *,
    previous: Flusher | None = None,
    preloaded: PreloadedFlusher | None = None,
    lead_attempt: int = 0,
) -> Flusher:
    """Attach to the run's flusher, within `start_seconds_max`; start one if none runs. Any thread. `previous`: the
    flusher that has ended, if its ring is still mapped: the next one may keep that ring. `preloaded`: a flusher that
    waits to begin. `lead_attempt`: the attempt of the job, if another stager leads, or if this one leads and its last
    process had it; 0 if this flusher chooses it.

    Raises:
        StoreError, FencedError, ConfigError: The flusher could not start; its own error.
        PeerLost: The flusher did not answer in time, or ended without a message.
    """
    deadline = time.monotonic() + config.start_seconds_max
    directory = _directory(config)
    socket_path = directory / ipc.SOCKET_NAME
    attempt = 0 if previous is None else previous.attempt
    hello = {
        "attempt": attempt,
        "share": [config.share.index, config.share.writers],
        "lead_attempt": lead_attempt,
        "standing": config.listen is not None,
    }
    connected = _handshake(socket_path, hello, deadline)
    if connected is None:
        _start_flusher(config, deadline, preloaded)
        if previous is None:
            _adopt_rings(config)
        connected = _handshake(socket_path, hello, deadline, wait=True)
    if connected is None:
        raise PeerLost(
            f"the flusher that was started hung up before it answered; see {log_path('flusher', config.store)}"
        )
    if preloaded is not None:
        preloaded.close()
    channel, welcome = connected
    try:
        if config.chunk_bytes is not None and welcome["chunk_bytes"] != config.chunk_bytes:
            _log.warning(
                "the flusher that serves this run has chunks of %d bytes, so the setting chunk_bytes = %d is not used",
                welcome["chunk_bytes"],
                config.chunk_bytes,
            )
        resumed, prior_failures = welcome["resumed"], FailureCount.from_json(welcome.get("seen"))
        if resumed and (previous is None or welcome["attempt"] != attempt):
            raise ProtocolError(
                f"the flusher (process {welcome['pid']}) resumes attempt {welcome['attempt']}, expected {attempt}"
            )
        if resumed and previous is not None:
            ring = previous.ring
        else:
            ring = Ring.attach(directory)
            ring.hold(welcome["attempt"])
    except BaseException:
        channel.close()
        raise
    return Flusher(
        channel, ring, welcome["attempt"], welcome["store_url"], welcome["pid"], resumed, prior_failures
    )


def _directory(config: StagerConfig) -> Path:
    return runtime_directory(config.store, config.runtime_dir, share=config.share.index)


def reap() -> None:
    """Reap and log flushers that this process started and that have ended."""
    for process in [process for process in _started if process.poll() is not None]:
        killed_before, code = _started.pop(process), process.returncode
        if code == -signal.SIGKILL and count_oom_kills() > killed_before:
            _log.error(
                "the flusher (process %d) was killed by the kernel because the memory was used up: raise the limit of "
                "its control group, or lower ring_bytes",
                process.pid,
            )
            continue
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        _log.info("the flusher (process %d) ended with %s", process.pid, how)


def _handshake(
    socket_path: Path, hello: Mapping[str, Any], deadline: float, *, wait: bool = False
) -> tuple[ipc.Channel, dict[str, Any]] | None:
    """Connect, send `hello`, and return channel and welcome; None if no flusher answered, or it was ending and hung up.
    `wait`: retry until the deadline, because the flusher was just started.
    """
    try:
        channel = ipc.connect(
            socket_path, wait_seconds=max(0.0, deadline - time.monotonic()) if wait else 0.0
        )
    except PeerLost:
        if wait:
            raise
        return None
    try:
        channel.send("hello", version=ipc.VERSION, pid=os.getpid(), **hello)
        welcome = _await_welcome(channel, deadline)
    except BaseException:
        channel.close()
        raise
    if welcome is None:
        _log.info("the flusher (process %d) has just ended; another one is started", channel.peer_pid)
        channel.close()
        return None
    if not wait:
        _log.info(
            "the flusher (process %d) already serves this run; the stager attaches to it", channel.peer_pid
        )
    return channel, welcome


def _await_welcome(channel: ipc.Channel, deadline: float) -> dict[str, Any] | None:
    """Return the welcome's fields; None if the flusher hung up. Raises `HoldfastError`: it refused, or is too late."""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while (left_seconds := deadline - time.monotonic()) > 0:
            selector.select(left_seconds)
            for message in channel.poll(most=1):  # what follows the welcome is for the attached stager
                if message.kind == "welcome":
                    return message.fields
                if message.kind == "refused":
                    raise peer_error(message.fields["code"], message.fields["message"])
            if channel.closed:
                return None
    raise PeerLost(
        f"the flusher (process {channel.peer_pid}) did not answer in time; look whether it still serves another job"
    )


def _launch(
    config: StagerConfig, first: list[str], stdin: int, *, output: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Start a flusher in a session of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    with log_path("flusher", config.store).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "flusher", *first, *_arguments(config)],
            stdin=stdin,
            stdout=output,
            stderr=log,
            start_new_session=True,
            env=environment,
        )


def _start_flusher(config: StagerConfig, deadline: float, preloaded: PreloadedFlusher | None) -> None:
    """Start a flusher, or tell the waiting one to begin, and wait until it is ready."""
    path = log_path("flusher", config.store)
    process = (preloaded and preloaded.begin(config)) or _launch(config, [], subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout as output:
        line = _first_line(output, deadline)
    if line is None:
        process.kill()
        process.wait()
        raise PeerLost(
            f"the flusher (process {process.pid}) was not ready within {config.start_seconds_max:g} s and was ended; "
            f"see {path}"
        )
    try:
        document = json.loads(line)
        error = document.get("error")
        ready = document.get("ready") is True
    except (ValueError, AttributeError):
        error, ready = None, False
    if ready:
        _started[process] = count_oom_kills()
        _log.info("started the flusher (process %d), its log is %s", process.pid, path)
        return
    code = process.wait()
    if isinstance(error, dict):
        raise peer_error(str(error.get("code")), str(error.get("message")))
    raise PeerLost(
        f"the flusher ended with exit code {code} before it was ready; {path} ends with:\n{last_lines(path)}"
    )


def _adopt_rings(config: StagerConfig) -> None:
    """Start flushers for rings that other shares left on this machine; nobody else would publish them."""
    for orphan in orphaned_rings(config.store, config.runtime_dir, config.share):
        if orphan.has_stager:
            _log.warning(
                "the ring of share %s on this machine, %s, has checkpoints and no flusher; the stager of that share "
                "starts one if it is on this machine; otherwise run `%s` here",
                *(orphan.share, orphan.directory, orphan.command(config.store)),
            )
            continue
        # Keep the ring's sizes. The metrics port is taken by our own flusher.
        unset = dict.fromkeys(("chunk_bytes", "ring_bytes", "metrics_port"))
        of_share = config.model_copy(update={**unset, "share": orphan.share, "linger": False})
        process = _launch(of_share, [], subprocess.DEVNULL, output=subprocess.DEVNULL)
        _started[process] = count_oom_kills()
        _log.warning(
            "the ring of share %s on this machine, %s, has checkpoints and no flusher: started one, process %d, as by "
            "`%s`",
            *(orphan.share, orphan.directory, process.pid, orphan.command(config.store)),
        )


def _arguments(config: StagerConfig) -> list[str]:
    """Render the settings that stager and flusher share as options of the flusher's command."""
    shared = config.model_copy(update={"keep_hourly": config.hourly_kept, "keep_daily": config.daily_kept})
    arguments: list[str] = []
    for name in FlusherConfig.model_fields:
        if name not in StagerConfig.model_fields:
            continue
        option, value = name.replace("_", "-"), getattr(shared, name)
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            arguments += [f"--{option}", str(value)]
    return arguments


def _first_line(output: BinaryIO | Any, deadline: float) -> bytes | None:
    """Read the first line, or all output if it ends before; None at the deadline."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while (left_seconds := deadline - time.monotonic()) > 0:
            if not selector.select(left_seconds):
                continue
            data = os.read(output.fileno(), _READY_LINE_BYTES_MAX)
            line += data
            if not data or b"\n" in line or len(line) > _READY_LINE_BYTES_MAX:
                return line
    return None
