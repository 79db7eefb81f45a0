"""A chart for page.js: spans in lanes, or lines. The names of colours are those of page.css."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.command.output import escape_controls

Unit = Literal["time", "seconds", "step", "number"]
# Each colour has one meaning, on every page and in every part of a page.
Colour = Literal[
    "training", "starting", "staged", "durable", "verified", "lost", "back", "stall", "declined", "idle"
]


@dataclass(frozen=True, slots=True)
class Span:
    """A bar from `begin` to `end` in a lane; `text` is its tooltip."""

    lane: str
    begin: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Series:
    """Spans, the points of a line, or marks from top to bottom, with one meaning."""

    name: str
    colour: Colour
    spans: Sequence[Span] = ()
    points: Sequence[tuple[float, float]] = ()
    marks: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    name: str
    text: str  # a description for readers who do not see the picture
    x: Unit  # unit of the horizontal axis; `time` is in Unix seconds
    series: Sequence[Series]
    lanes: Sequence[str] = ()  # names from top to bottom; empty: the chart has lines
    y: Unit = "number"
    x_title: str = ""
    y_title: str = ""
    is_logarithmic: bool = False

    @property
    def is_empty(self) -> bool:
        return not any(one.spans or len(one.points) > 1 for one in self.series)

    def document(self) -> dict[str, object]:
        """Return the JSON for page.js. Texts are untrusted: control characters are escaped."""
        return {
            "x": self.x,
            "y": self.y,
            "xTitle": self.x_title,
            "yTitle": self.y_title,
            "lanes": list(self.lanes),
            "logarithmic": self.is_logarithmic,
            "series": [_series(one) for one in self.series if one.spans or one.points or one.marks],
        }


def _series(one: Series) -> dict[str, object]:
    data: list[dict[str, object]] = [
        {"x": [round(span.begin, 3), round(span.end, 3)], "y": span.lane, "text": escape_controls(span.text)}
        for span in one.spans
    ]
    data += [{"x": x, "y": y} for x, y in one.points]
    return {"name": one.name, "colour": one.colour, "data": data, "marks": list(one.marks)}
