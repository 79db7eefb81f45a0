"""`DataPlace`: an object in the state that knows how far training has come in its data."""

from __future__ import annotations

import abc
from typing import Any


class DataPlace(abc.ABC):
    """The place in the data, for the proof of a resume (trainer_side/proof/)."""

    @abc.abstractmethod
    def mark_place(self) -> None:
        """Remember the place as it is now; loading a state does so, too."""

    @abc.abstractmethod
    def place(self) -> dict[str, Any]:
        """Small and as JSON: the place now, the same on every rank; `from`: at the mark, if it is a number of samples
        that is the same on any number of ranks.
        """
