"""Runs a test over many seeds as one test: a loop whose failure names the seed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["each_seed"]


def each_seed(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test with `seed` 0, 1, … below this number; its other arguments are the same each time."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def play(**arguments: Any) -> None:
            for seed in range(count):
                try:
                    test(seed=seed, **arguments)
                except Exception as error:
                    raise AssertionError(f"{test.__name__}(seed={seed}): {error!r}") from error

        signature = inspect.signature(test)
        others = [one for name, one in signature.parameters.items() if name != "seed"]
        play.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return play

    return decorate
