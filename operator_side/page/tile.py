"""A tile: the figure of one fact, which a reader sees first."""

from __future__ import annotations

from typing import NamedTuple

from operator_side.page.chart import Colour


class Tile(NamedTuple):
    """A figure with its unit, what it is of, and a note; `colour` has the meaning that it has in the charts."""

    name: str
    figure: str
    note: str = ""
    colour: Colour | str = ""
