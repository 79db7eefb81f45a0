"""The regions that a rank holds of split tensors, as it names them when it proposes its state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from holdfast.errors import ProtocolError
from holdfast.image.entries import SPLIT
from holdfast.image.regions import Region
from holdfast.wire.frames import wholes


@dataclass(frozen=True)
class HeldRegions:
    """The regions that one rank holds of the split tensors in its table. Many rows have the same one.

    Attributes:
        regions: `(bytes of one element, region)`; a region without elements where the rank holds nothing.
        rows: `(row of the table, which of the regions)`, rows ascending.
    """

    regions: tuple[tuple[int, Region], ...] = ()
    rows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, held: Iterable[tuple[int, int, Region]]) -> Self:
        """From `(row, bytes of one element, region)` of each split tensor."""
        numbers: dict[tuple[int, Region], int] = {}
        rows = [
            (row, numbers.setdefault((item_bytes, region), len(numbers))) for row, item_bytes, region in held
        ]
        return cls(tuple(numbers), tuple(rows))

    def to_json(self) -> dict[str, Any]:
        regions = [[item_bytes, list(one.start), list(one.size)] for item_bytes, one in self.regions]
        return {"regions": regions, "rows": [list(row) for row in self.rows]}

    @classmethod
    def from_json(cls, document: Any, table: list[list[Any]], *, of_stage: bool = False) -> Self:
        """Read what `to_json` made, for the rows of this table that are split; of a stage, for others as well.

        Raises:
            ProtocolError: It is not that.
        """
        try:
            regions = tuple(
                (wholes([item_bytes])[0], Region(wholes(start), wholes(size)))
                for item_bytes, start, size in document["regions"]
            )
            rows = tuple((row, number) for row, number in map(wholes, document["rows"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"PROPOSE: regions that cannot be read: {error}") from error
        wanted = [row for row, (_, _, _, owner) in enumerate(table) if owner == SPLIT]
        given = [row for row, _ in rows]
        if of_stage:
            fits = given == sorted({*given, *wanted}) and all(row < len(table) for row in given)
        else:
            fits = given == wanted
        if not fits or any(number >= len(regions) for _, number in rows):
            raise ProtocolError(
                f"PROPOSE: regions for {len(rows)} rows, expected one for each of {len(wanted)}"
            )
        return cls(regions, rows)
