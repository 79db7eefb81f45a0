"""A run in a directory that has no place to be is refused, unless it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import StoreError
from holdfast.store.missing_parent import refuse_missing_parent


def test_a_file_system_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    run = tmp_path / "nfs" / "team" / "run"
    with pytest.raises(StoreError) as caught:
        refuse_missing_parent(str(run), create=False)
    for words in (str(run), f"no directory {run.parent}", f"exists is {tmp_path}", "mounted", "--create"):
        assert words in str(caught.value)
    assert not caught.value.retriable
    assert not (tmp_path / "nfs").exists()


def test_a_new_run_beside_others_and_an_old_one_are_fine(tmp_path: Path) -> None:
    refuse_missing_parent(str(tmp_path / "run"), create=False)
    refuse_missing_parent(f"file://{tmp_path}/run", create=False)
    refuse_missing_parent(str(tmp_path), create=False)


def test_whoever_asks_for_it_gets_it(tmp_path: Path) -> None:
    refuse_missing_parent(str(tmp_path / "a" / "b" / "run"), create=True)


def test_only_paths_are_looked_at() -> None:
    refuse_missing_parent("s3://no-such-bucket/a/run", create=False)
    refuse_missing_parent("memory://a/b/run", create=False)


def test_a_file_in_the_way_is_left_to_the_stores_own_check(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refuse_missing_parent(str(tmp_path / "file" / "a" / "run"), create=False)
