"""Kills in a slot's life (tests/chaos/slots.py), except those in tests/chaos/regular."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.slots import SLOT_CELLS, Machine, SlotCell, play

pytestmark = [pytest.mark.mpi]


@pytest.mark.parametrize(
    "slot_cell", [cell for cell in SLOT_CELLS if not cell.regular], ids=lambda cell: cell.name
)
def test_slot_cell(slot_cell: SlotCell, machine: Machine, directory_reference: Path) -> None:
    play(slot_cell, machine, directory_reference)
