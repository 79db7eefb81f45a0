"""Calls of a device or a store that may never return: made in another thread, and waited for only so long.

A thread that hangs in the kernel cannot be ended. It is left behind, and what it still brings counts no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["HANGING_SHARE", "within"]

_T = TypeVar("_T")
HANGING_SHARE = 0.1  # of the time for restoring: a source that brings nothing for so long hangs


def within(
    call: Callable[[], _T], seconds_max: float, *, name: str, late: Callable[[_T], object] | None = None
) -> _T:
    """Make a call without waiting for it any longer than that.

    Args:
        call: The call.
        seconds_max: How long it may take.
        name: Of the thread.
        late: Gets what it returns after all.

    Raises:
        TimeoutError: It has not returned in time.
        BaseException: What the call raised.
    """
    done, guard = threading.Event(), threading.Lock()
    found: list[_T] = []
    problems: list[BaseException] = []
    waiting = True

    def make() -> None:
        try:
            answer = call()
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            problems.append(error)
        else:
            with guard:
                found.append(answer)
                if not waiting and late is not None:
                    late(answer)
        done.set()

    threading.Thread(target=make, name=name, daemon=True).start()
    if not done.wait(seconds_max):
        with guard:
            waiting = bool(found)
    if problems:
        raise problems[0]
    if not found:
        raise TimeoutError(f"not returned within {seconds_max:g} s")
    return found[0]
