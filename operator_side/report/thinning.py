"""Of many the few that are shown: the first, the last, what stands out, and evenly chosen ones of the rest. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["bins", "thinned"]

_Item = TypeVar("_Item")


def thinned(
    items: Sequence[_Item], most: int, stands_out: Callable[[_Item], bool] = lambda _: False
) -> list[_Item]:
    """At most `most` of them, in their order.

    Args:
        items: All.
        most: So many at most.
        stands_out: Whether one is to be kept rather than another; of too many of them the last ones are.
    """
    if len(items) <= most:
        return list(items)
    kept = {0, len(items) - 1} if most > 1 else {len(items) - 1}
    special = [index for index, item in enumerate(items) if index not in kept and stands_out(item)]
    room = max(0, most - len(kept))
    kept.update(special[-room:] if room else [])
    room = most - len(kept)
    rest = [index for index in range(len(items)) if index not in kept]
    if room > 0:
        kept.update(rest[index * len(rest) // room] for index in range(room))
    return [items[index] for index in sorted(kept)]


def bins(
    levels: Sequence[tuple[float, float]], begin: float, end: float, count: int
) -> list[tuple[float, float]]:
    """The greatest of a value in each of `count` equal times; each level holds until the next one.

    Gives (begin of the time, greatest value).
    """
    width = (end - begin) / count
    greatest = [0.0] * count
    if width <= 0:
        return []
    for index, (at, value) in enumerate(levels):
        until = levels[index + 1][0] if index + 1 < len(levels) else end
        first = min(count - 1, max(0, int((at - begin) / width)))
        last = min(count - 1, max(first, int((until - begin) / width)))
        for place in range(first, last + 1):
            greatest[place] = max(greatest[place], value)
    return [(begin + index * width, value) for index, value in enumerate(greatest)]
