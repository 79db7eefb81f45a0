"""Play one cell of the kill matrix: a real job that is killed, relaunched and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast.faultpoint import Point
from holdfast.store.spare_room import writes_in_place
from tests.chaos.cells import EVERYBODY, SAVES, Cell
from tests.chaos.place import BucketPlace, DirectoryPlace, GrowingPlace, Place, RefusingPlace
from tests.chaos.scenario import Scenario

__all__ = ["parameters", "play"]


def parameters(cells: Iterable[Cell]) -> list[object]:
    """Cells for pytest.mark.parametrize."""
    return [
        pytest.param(cell, id=cell.name, marks=[pytest.mark.s3] if cell.store == "s3" else [])
        for cell in cells
    ]


def play(cell: Cell, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Kill, relaunch, check."""
    stage, victims = cell.stage, cell.victims
    if stage.point is Point.FILE_RETIRED and not writes_in_place(tmp_path):
        pytest.skip(f"{tmp_path} is not on ext4 or XFS: no room is used again there")
    place: Place
    if cell.split:
        place = DirectoryPlace(tmp_path / "store", split=True)
        reference, number = request.getfixturevalue("split_reference"), stage.number_split or stage.number
    elif cell.store == "s3":
        place = BucketPlace(request.getfixturevalue("swift_s3"))
        reference, number = request.getfixturevalue("bucket_reference"), stage.number_s3
    elif stage.grows:
        place = GrowingPlace(tmp_path / "store")
        reference, number = request.getfixturevalue("growing_reference"), stage.number
    else:
        place = (RefusingPlace if stage.refused else DirectoryPlace)(tmp_path / "store")
        reference, number = request.getfixturevalue("directory_reference"), stage.number
    goes_on = victims.processes in {(), ("flusher",)}
    first_chunks = GrowingPlace.first_chunks if stage.grows and goes_on else 0
    scenario = Scenario(
        place,
        tmp_path,
        reference,
        ulfm=cell.ulfm,
        keep_last=stage.keep_last,
        ring=stage.ring,
        tcp=cell.tcp,
    )
    with contextlib.closing(scenario):
        if stage.seeded:
            scenario.after(saves=stage.seeded)
        if stage.ring_left:
            scenario.kill(*EVERYBODY, at="stager@staged", n=2, staged=2)
        scenario.kill(
            *victims.processes,
            at=stage.where,
            n=number,
            machine=victims.machine,
            then=stage.then,
            staged=stage.staged,
            durable=stage.durable,
            torn=SAVES[1] if stage.torn else -1,
            doubted=SAVES[1] if stage.doubted else -1,
            first_chunks=first_chunks,
            gone=stage.gone,
            mend=place.mend if isinstance(place, RefusingPlace) else lambda: None,
        )
        assert len(scenario.staged_at_kill) <= stage.staged_max, "the kill came too late to show anything"
        if stage.torn and victims.name == "a rank":
            scenario.check_torn(SAVES[1])
        scenario.relaunch(elsewhere=cell.elsewhere).check()
