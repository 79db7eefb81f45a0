"""Names stay inside the run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StoreError
from holdfast.store.names import check_name, check_write_id, is_kept, temporary_name


@given(st.text(max_size=40))
def test_a_checked_name_stays_inside_the_run(name: str) -> None:
    try:
        check_name(name)
    except StoreError:
        return
    assert name
    assert not name.startswith("/")
    assert ".." not in name.split("/")
    assert "\0" not in name
    assert not name.startswith(".holdfast/tmp")


@pytest.mark.parametrize(
    "name", ["step-000000001.pt", ".holdfast/writer-000007.json", "a/b/c", "..a", "ä.json", ".holdfast/tmpx"]
)
def test_ordinary_names_pass(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("write_id", ["", "../x", "a/b", "-a", "x" * 101, "a b", "a\n"])
def test_write_ids_that_are_no_part_of_a_name_are_refused(write_id: str) -> None:
    with pytest.raises(StoreError, match="write-id"):
        check_write_id(write_id)


def test_temporary_names_are_found_by_their_write_id() -> None:
    name = temporary_name("w-1", "sub/step.pt")
    assert name == ".holdfast/tmp/w-1-sub_step.pt"
    assert is_kept(name, frozenset({"w-1"}))
    assert not is_kept(name, frozenset({"w-2", "1"}))
    assert not is_kept(name, frozenset())
