"""Carries orders to the ranks and answers back, as JSON lines over one Unix socket.

    schedule ── Hub.ask(job, order) ──► Link.orders() in each of its ranks ── Link.answer() ──► list by rank

A rank that waits for an order sleeps in `recv`, so the peers of two jobs take turns without disturbing each
other.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

__all__ = ["Hub", "Link"]

_CONNECT_SECONDS_MAX = 120.0
_LOOK_SECONDS = 0.5
_ANSWER_SECONDS_MAX = 300.0


class _Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._file: TextIO = connection.makefile("r", encoding="utf-8")

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        line = self._file.readline()
        return dict(json.loads(line)) if line else None

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Hub:
    """The orchestrator's side; for one thread.

    Args:
        path: The socket to create; at most 100 characters.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._channels: dict[str, dict[int, _Channel]] = {}

    def gather(self, job: str, ranks: int, *, ended: Callable[[], bool] = lambda: False) -> None:
        """Wait until all `ranks` of `job` have connected.

        Args:
            ended: Whether the job is over, so that no further rank will connect.

        Raises:
            RuntimeError: Some did not connect within two minutes, or before the job's end.
        """
        deadline = time.monotonic() + _CONNECT_SECONDS_MAX
        while len(self._channels.get(job, {})) < ranks:
            self._server.settimeout(_LOOK_SECONDS)
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                if not ended() and time.monotonic() < deadline:
                    continue
                here = sorted(self._channels.get(job, {}))
                raise RuntimeError(f"job {job}: ranks {here} of {ranks} came; see the log") from None
            connection.settimeout(_ANSWER_SECONDS_MAX)
            channel = _Channel(connection)
            hello = channel.receive()
            assert hello is not None
            self._channels.setdefault(str(hello["job"]), {})[int(hello["rank"])] = channel

    def ask(self, job: str, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Send one order to every rank of `job`, and return their answers by rank.

        Raises:
            RuntimeError: A rank ended, or answered with an error.
            TimeoutError: A rank did not answer within five minutes.
        """
        channels = sorted(self._channels[job].items())
        for _, channel in channels:
            channel.send(order)
        answers = []
        failed = ""
        for (
            rank,
            channel,
        ) in channels:  # read every answer even if one rank failed: the others still send theirs
            answer = channel.receive()
            if answer is None:
                answer = {"error": "ended"}
            if "error" in answer:
                failed = failed or f"job {job}, rank {rank}, order {order}: {answer['error']}; see its log"
            answers.append(answer)
        if failed:
            raise RuntimeError(failed)
        return answers

    def dismiss(self, job: str) -> None:
        """Close the streams of `job`'s ranks, which makes them exit."""
        for channel in self._channels.pop(job).values():
            channel.close()

    def close(self) -> None:
        """Close all streams, which makes waiting ranks exit."""
        for channels in self._channels.values():
            for channel in channels.values():
                channel.close()
        self._server.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Hub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Link:
    """The rank's side."""

    def __init__(self, path: Path, *, job: str, rank: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(path))
        self._channel = _Channel(connection)
        self._channel.send({"job": job, "rank": rank})

    def orders(self) -> Iterator[dict[str, Any]]:
        """Yield orders until the hub closes the stream."""
        while (order := self._channel.receive()) is not None:
            yield order

    def answer(self, message: dict[str, Any]) -> None:
        self._channel.send(message)

    def close(self) -> None:
        """Close the stream, so that the hub sees the end of this rank."""
        self._channel.close()
