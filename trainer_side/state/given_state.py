"""The dictionary that the script handed to the `Checkpointer`, and may still put values into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import StateError
from trainer_side.state.per_rank import PerRank


class GivenState:
    """Keeps what a checkpoint holds in step with the script's dictionary. Training thread.

    Args:
        given: Names mapped to objects, tensors, plain values or `PerRank(...)`, as the script holds it.

    Attributes:
        held: The values that the next checkpoint takes. It stays the same dictionary.

    Raises:
        StateError: A name is empty, is not a string, or has a slash.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        for name in list[object](given):
            _refuse_name(name)
        self.held: dict[str, Any] = dict(given)
        # Others may put a stand-in into `held`: only what the script changes is taken.
        self._seen: dict[str, Any] = dict(given)

    def problem(self) -> StateError | None:
        """Do as `take_new`; returns its error, to be told to the other ranks."""
        try:
            self.take_new()
        except StateError as error:
            return error
        return None

    def take_new(self) -> None:
        """Take the values that the script has put into its dictionary since the last call.

        Tensors, plain values and `PerRank` values are taken. An object with a `state_dict()` is refused: `restore()`
        did not load it, and the gate does not know its optimizer.

        Raises:
            StateError: Names the object, and says what to do.
        """
        for name, value in self._given.items():
            before = self._seen.get(name, self)
            if before is value:
                continue
            _refuse_name(name)
            if _is_object(value) or _is_object(before):
                what = "is another object now" if name in self._seen else "was added"
                raise StateError(
                    f"{name}: expected the objects that the Checkpointer was made with, got a {type(value).__name__} "
                    f"that {what}; no checkpoint would have its state. Put every object with a state_dict() into the "
                    "dictionary first, and make the Checkpointer then"
                )
            self.held[name] = self._seen[name] = value


def _refuse_name(name: object) -> None:
    if not (isinstance(name, str) and name and "/" not in name):
        raise StateError(f"names in the state are non-empty strings without '/', got {name!r}")


def _is_object(value: Any) -> bool:
    return not isinstance(value, PerRank | type) and callable(getattr(value, "state_dict", None))
