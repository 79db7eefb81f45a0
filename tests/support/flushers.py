"""For fixtures: flushers that a test starts, and that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.support.stager_client import FlusherProcess

__all__ = ["watched"]

F = TypeVar("F", bound=FlusherProcess)


@contextmanager
def watched(place: Path, make: Callable[..., F]) -> Iterator[Callable[..., F]]:
    """Yield a function that starts flushers; it takes the arguments of `make`.

    At the end, kill those still alive. Raises AssertionError if their log, `place`/flusher.log, has a traceback.
    """
    started: list[F] = []

    def start(*options: object, **more: object) -> F:
        started.append(make(*options, **more))
        return started[-1]

    yield start
    for flusher in started:
        if flusher.process.poll() is None:
            flusher.kill()
        assert flusher.process.stdout is not None
        flusher.process.stdout.close()
    log = (place / "flusher.log").read_text() if (place / "flusher.log").exists() else ""
    print(log)
    assert "Traceback" not in log
