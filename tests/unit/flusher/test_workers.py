import gc
import threading
import weakref
from collections.abc import Callable

from flusher.workers import Workers


class Held:
    """Represents the manifest that a job holds."""


def job_of(held: Held, done: threading.Semaphore) -> Callable[[], None]:
    def job() -> None:
        assert held is not None
        done.release()

    return job


def test_a_thread_that_waits_holds_nothing_of_the_job_before() -> None:
    workers, done = Workers("test", 2), threading.Semaphore(0)
    held = [Held() for _ in range(8)]
    ends = [threading.Event() for _ in held]
    for one, end in zip(held, ends, strict=True):
        weakref.finalize(one, end.set)
        workers.submit((0,), job_of(one, done))
    assert all(done.acquire(timeout=20) for _ in held)
    del one
    held.clear()
    gc.collect()
    assert all(end.wait(20) for end in ends)
    workers.stop()
