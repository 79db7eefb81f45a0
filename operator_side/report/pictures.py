"""The report's pictures as SVG, drawn by hand: lanes over time, bars, columns, dots. Colours are classes of style.py.

Each has a title and a description for who does not see it; the tables beside it have the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from operator_side.report.markup import Html, brief, clock, join, tag

_WIDTH = 960.0
_LEFT, _RIGHT = 120.0, 16.0
_LANE_HEIGHT, _LANE_GAP = 18.0, 8.0
_PLOT_HEIGHT = 150.0
_AXIS_HEIGHT = 26.0
_TICKS = 6
_LABEL_WIDTH = 40.0
_BAR_WIDTH_MIN = 1.5
_DAY_SECONDS = 86400.0
_HISTOGRAM_BINS = 24
_LOG_RATIO_MIN = 50.0
_LOG_LEAST = 1e-6


class Bar(NamedTuple):
    """From `begin` to `end`, in seconds of the axis, with a tooltip."""

    begin: float
    end: float
    class_: str
    title: str


class BarRow(NamedTuple):
    name: str
    bars: Sequence[Bar]


class Series(NamedTuple):
    """Values over time, drawn as dots or as touching columns."""

    name: str
    class_: str
    points: Sequence[tuple[float, float]]
    as_columns: bool = False


def _figure(name: str, title: str, description: str, height: float, *children: str | None) -> Html:
    picture = tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", description, id=f"{name}-desc"),
        *children,
        viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )
    return tag("div", picture, class_="wide", role="region", aria_label=title, tabindex="0")


def _scale(begin: float, end: float) -> Callable[[float], float]:
    span = max(end - begin, 1e-9)
    return lambda at: _LEFT + (min(max(at, begin), end) - begin) / span * (_WIDTH - _LEFT - _RIGHT)


def lanes(
    name: str,
    title: str,
    description: str,
    rows: Sequence[BarRow],
    begin: float,
    end: float,
    *,
    is_clock: bool = True,
) -> Html:
    """Bars in rows over one axis of time, in Unix seconds or in seconds from 0."""
    x = _scale(begin, end)
    height = len(rows) * (_LANE_HEIGHT + _LANE_GAP) + _AXIS_HEIGHT
    parts: list[Html] = [_axis(begin, end, height - _AXIS_HEIGHT, is_clock=is_clock)]
    for index, lane in enumerate(rows):
        y = index * (_LANE_HEIGHT + _LANE_GAP) + _LANE_GAP / 2
        parts.append(tag("text", lane.name, x=_LEFT - 8, y=y + _LANE_HEIGHT - 5, class_="name"))
        drawn = []
        for one in lane.bars:
            left = x(one.begin)
            width = max(_BAR_WIDTH_MIN, x(one.end) - left)
            left = min(left, _WIDTH - _RIGHT - width)
            box = tag(
                "rect",
                tag("title", one.title),
                x=left,
                y=y,
                width=width,
                height=_LANE_HEIGHT,
                class_=one.class_,
            )
            drawn.append(box)
        parts.append(tag("g", *drawn))
    return _figure(name, title, description, height, *parts)


def _axis(begin: float, end: float, bottom: float, *, is_clock: bool) -> Html:
    x = _scale(begin, end)
    parts = []
    for at in _ticks(begin, end) if is_clock else _round_ticks(end):
        words = clock(at, day=end - begin > _DAY_SECONDS) if is_clock else brief(at)
        anchor = "start" if at == begin else "end" if x(at) > _WIDTH - _LABEL_WIDTH else "middle"
        parts.append(tag("line", x1=x(at), x2=x(at), y1=0, y2=bottom, class_="grid"))
        parts.append(tag("text", words, x=x(at), y=bottom + 18, text_anchor=anchor))
    return tag("g", *parts, class_="axis")


def _ticks(begin: float, end: float) -> Iterable[float]:
    """Ticks of a clock, from the first moment to the last."""
    return (*(begin + (end - begin) * tick / (_TICKS - 1) for tick in range(_TICKS - 1)), end)


def _round_ticks(end: float) -> Iterable[float]:
    """Ticks from 0 on in steps of 1, 2 or 5 times a power of ten, at most `_TICKS`."""
    least = max(end, 1e-9) / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    return (step * tick for tick in range(_TICKS + 1) if step * tick <= end)


def bars(name: str, title: str, description: str, parts: Sequence[tuple[str, float, str]]) -> Html:
    """One bar of several parts, in shares of their sum; a part is (words, value, class)."""
    total = sum(value for _, value, _ in parts) or 1.0
    drawn, x = [], 0.0
    for words, value, class_ in parts:
        width = value / total * _WIDTH
        if width > 0:
            drawn.append(tag("rect", tag("title", words), x=x, y=4, width=width, height=32, class_=class_))
        x += width
    return _figure(name, title, description, 40, *drawn)


def histogram(name: str, title: str, description: str, values: Sequence[float], class_: str) -> Html:
    """How often each length of time occurred; columns get wider to the right if the greatest are far off."""
    edges = _edges(min(values), max(values))
    counts = [0] * (len(edges) - 1)
    for value in values:
        place = next((index for index in range(len(counts)) if value < edges[index + 1]), len(counts) - 1)
        counts[place] += 1
    highest, width = max(counts), (_WIDTH - _LEFT - _RIGHT) / len(counts)
    parts: list[Html] = [_scale_of_counts(highest)]
    for index, count in enumerate(counts):
        left = _LEFT + index * width
        if count:
            height = max(2.0, count / highest * (_PLOT_HEIGHT - 10))
            words = f"{brief(edges[index])} to {brief(edges[index + 1])}: {count}"
            top = _PLOT_HEIGHT - height
            parts.append(
                tag(
                    "rect",
                    tag("title", words),
                    x=left + 1,
                    y=top,
                    width=width - 2,
                    height=height,
                    class_=class_,
                )
            )
        if index % 6 == 0:
            parts.append(tag("text", brief(edges[index]), x=left, y=_PLOT_HEIGHT + 18))
    parts.append(tag("text", brief(edges[-1]), x=_WIDTH - _RIGHT, y=_PLOT_HEIGHT + 18, text_anchor="end"))
    return _figure(name, title, description, _PLOT_HEIGHT + _AXIS_HEIGHT, *parts)


def _edges(least: float, greatest: float) -> list[float]:
    if greatest <= least:
        return [least, least + (abs(least) or 1.0) * 0.01]
    count = _HISTOGRAM_BINS
    if least >= _LOG_LEAST and greatest / least > _LOG_RATIO_MIN:
        factor = (greatest / least) ** (1 / count)
        return [least * factor**index for index in range(count)] + [greatest]
    step = (greatest - least) / count
    return [least + index * step for index in range(count)] + [greatest]


def _scale_of_counts(highest: int) -> Html:
    return join(
        tag("text", str(highest), x=_LEFT - 8, y=18, class_="name"),
        tag("text", "0", x=_LEFT - 8, y=_PLOT_HEIGHT, class_="name"),
        tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=_PLOT_HEIGHT, y2=_PLOT_HEIGHT, class_="grid"),
    )


def series(
    name: str,
    title: str,
    description: str,
    found: Sequence[Series],
    begin: float,
    end: float,
    words: Callable[[float], str],
) -> Html:
    """Values over one axis of time; `words` writes a value."""
    highest = max((value for one in found for _, value in one.points), default=0.0) or 1.0
    x = _scale(begin, end)
    parts: list[Html] = [
        _axis(begin, end, _PLOT_HEIGHT, is_clock=True),
        tag("text", words(highest), x=_LEFT - 8, y=14, class_="name"),
        tag("text", "0", x=_LEFT - 8, y=_PLOT_HEIGHT, class_="name"),
    ]
    for one in found:
        width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(one.points))
        parts.append(tag("g", *_marks(one, x, highest, width if one.as_columns else None, words)))
    return _figure(name, title, description, _PLOT_HEIGHT + _AXIS_HEIGHT, *parts)


def _marks(
    one: Series,
    x: Callable[[float], float],
    highest: float,
    width: float | None,
    words: Callable[[float], str],
) -> Iterable[Html]:
    for at, value in one.points:
        height = value / highest * (_PLOT_HEIGHT - 6)
        top = _PLOT_HEIGHT - height
        if width is None:
            title = tag("title", f"{one.name}, {clock(at, day=True)}: {words(value)}")
            yield tag("circle", title, cx=x(at), cy=top, r=3, class_=one.class_)
        elif value > 0:
            title = tag("title", f"{clock(at, day=True)}: {words(value)}")
            yield tag("rect", title, x=x(at), y=top, width=width, height=height, class_=one.class_)


_Item = TypeVar("_Item")


def thinned(
    items: Sequence[_Item], most: int, stands_out: Callable[[_Item], bool] = lambda _: False
) -> list[_Item]:
    """At most `most` of the items, in their order.

    Args:
        items: All items.
        most: Largest number of items to keep.
        stands_out: Whether an item is to be kept rather than others; of too many such items the last are kept.
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
    """The greatest level in each of `count` equal stretches of time; a level holds until the next one.

    Returns pairs of a stretch's begin and its greatest level.
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
