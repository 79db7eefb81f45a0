"""The error tree: its shape, codes and exit codes are a promise to scripts."""

from __future__ import annotations

import inspect
import pickle
import traceback

import pytest

from holdfast import errors
from holdfast.errors import HoldfastError, StoreError, StoreMissing

TREE = {
    "HoldfastError": ("Exception", "holdfast", 1),
    "ConfigError": ("HoldfastError", "config", 2),
    "StateError": ("HoldfastError", "state", 3),
    "ResumeDiffers": ("StateError", "resume_differs", 12),
    "StoreError": ("HoldfastError", "store", 4),
    "StoreMissing": ("StoreError", "missing", 5),
    "DamageError": ("HoldfastError", "damage", 6),
    "ProtocolError": ("HoldfastError", "protocol", 7),
    "FencedError": ("HoldfastError", "fenced", 8),
    "PeerLost": ("HoldfastError", "peer_lost", 9),
    "BusyError": ("HoldfastError", "busy", 10),
    "NotDurable": ("HoldfastError", "not_durable", 11),
}


def all_errors() -> dict[str, type[HoldfastError]]:
    return {n: c for n, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, HoldfastError)}


def test_the_tree_is_as_promised() -> None:
    found = {name: (c.__bases__[0].__name__, c.code, c.exit_code) for name, c in all_errors().items()}
    assert found == TREE


def test_every_error_is_exported_and_drawn_in_the_docstring() -> None:
    assert set(errors.__all__) == set(TREE)
    assert errors.__doc__ is not None
    for name, (_, _, exit_code) in TREE.items():
        assert name in errors.__doc__
        if name != "HoldfastError":
            assert any(
                name in line and line.endswith(f"exit {exit_code}") for line in errors.__doc__.splitlines()
            )


def test_codes_and_exit_codes_are_unique() -> None:
    assert len({c.code for c in all_errors().values()}) == len(TREE)
    assert len({c.exit_code for c in all_errors().values()}) == len(TREE)


@pytest.mark.parametrize(
    ("error", "retriable"), [(StoreError("x"), False), (StoreError("x", retriable=True), True)]
)
def test_a_store_error_says_whether_to_try_again(error: StoreError, retriable: bool) -> None:
    assert error.retriable is retriable
    assert str(error) == "x"


@pytest.mark.parametrize("kind", all_errors().values())
def test_a_traceback_ends_with_where_the_cures_are_and_the_message_is_as_it_was(
    kind: type[HoldfastError],
) -> None:
    error = pickle.loads(pickle.dumps(kind("what and where")))
    shown = "".join(traceback.format_exception(error)).splitlines()
    assert shown == [
        f"holdfast.errors.{kind.__name__}: what and where",
        f"help: holdfast explain {kind.code} (docs/troubleshooting.md#{kind.code})",
    ]
    assert str(error) == "what and where"


def test_store_missing_is_not_retriable() -> None:
    assert not StoreMissing("gone").retriable
