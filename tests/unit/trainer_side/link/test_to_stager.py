"""The interface to the stager stays small: interval, agreed steps and notices have their own classes."""

from __future__ import annotations

import inspect

from trainer_side.link.link import Link
from trainer_side.link.no_stager import NoStager
from trainer_side.link.to_stager import ToStager

MEMBERS_MAX = 8


def _members(face: type) -> set[str]:
    return {name for name in vars(face) if not name.startswith("_")}


def test_to_stager_has_at_most_eight_members() -> None:
    assert len(_members(ToStager)) <= MEMBERS_MAX


def test_both_implementations_take_the_arguments_of_the_interface() -> None:
    for name in _members(ToStager) - {"job"}:
        expected = list(inspect.signature(getattr(ToStager, name)).parameters)
        for implementation in (Link, NoStager):
            assert list(inspect.signature(getattr(implementation, name)).parameters) == expected, name
