"""The regions of split tensors that a rank holds; part of its PROPOSE."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from holdfast.errors import ProtocolError
from holdfast.image.entries import SPLIT
from holdfast.image.regions import Region
from holdfast.wire.frames import whole_numbers


@dataclass(frozen=True)
class HeldRegions:
    """The regions that one rank holds of the split tensors in its table. Many rows share a region."""

    # `(bytes of one element, region)`; an empty region for a tensor of which the rank holds no element
    regions: tuple[tuple[int, Region], ...] = ()
    rows: tuple[tuple[int, int], ...] = ()  # `(row of the table, index into regions)`, rows ascending

    @classmethod
    def of(cls, held: Iterable[tuple[int, int, Region]]) -> Self:
        """Collect `(row, bytes of one element, region)` of each split tensor."""
        numbers: dict[tuple[int, Region], int] = {}
        rows = [
            (row, numbers.setdefault((item_bytes, region), len(numbers))) for row, item_bytes, region in held
        ]
        return cls(tuple(numbers), tuple(rows))

    def regions_to_json(self) -> list[Any]:
        return [[item_bytes, list(one.start), list(one.size)] for item_bytes, one in self.regions]

    @classmethod
    def from_json(cls, regions: Any, rows: tuple[tuple[int, int], ...], needed: int) -> Self:
        """Read `regions_to_json`, for rows that refer to `needed` regions. Raises `ProtocolError`."""
        try:
            read = tuple(
                (whole_numbers([item_bytes])[0], Region(whole_numbers(start), whole_numbers(size)))
                for item_bytes, start, size in regions
            )
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"PROPOSE: regions that cannot be read: {error}") from error
        if needed > len(read):
            raise ProtocolError(f"PROPOSE: {len(read)} regions, and rows that name {needed}")
        return cls(read, rows)


def held_rows(
    document: Any, table: list[list[Any]], *, of_stage: bool = False
) -> tuple[tuple[int, int], ...]:
    """Read `HeldRegions.rows`: all split rows of the table, for a stage also others. Raises `ProtocolError`."""
    try:
        rows = tuple((row, number) for row, number in map(whole_numbers, document))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"PROPOSE: regions that cannot be read: {error}") from error
    wanted = [row for row, (_, _, _, owner) in enumerate(table) if owner == SPLIT]
    given = [row for row, _ in rows]
    if of_stage:
        fits = given == sorted({*given, *wanted}) and all(row < len(table) for row in given)
    else:
        fits = given == wanted
    if not fits:
        raise ProtocolError(f"PROPOSE: regions for {len(rows)} rows, expected one for each of {len(wanted)}")
    return rows
