"""`DataPlace`: an object in the state that knows the position of training in its data."""

from __future__ import annotations

import abc
from typing import Any


class DataPlace(abc.ABC):
    """The place in the data, for the proof of a resume (trainer_side/proof/)."""

    @abc.abstractmethod
    def mark_place(self) -> None:
        """Remember the current place; loading a state does so, too."""

    def shared_settings(self) -> dict[str, Any]:
        """Return the settings that are the same on every rank, as a small JSON object."""
        return {}

    @abc.abstractmethod
    def place(self) -> dict[str, Any]:
        """Return the current place as a small JSON object, the same on every rank.

        `from` is the place at the mark, if that is a number of samples that does not depend on the number of ranks.
        """
