"""Nightly, more of tests/story/test_main_job_s3.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.image.manifest import State
from tests.story.test_main_job_s3 import Finished, check_bucket, pull_all, uninterrupted
from tests.support.cluster import check_loadable

pytestmark = [pytest.mark.mpi, pytest.mark.s3]


def test_a_run_on_moto(uninterrupted: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in uninterrupted.place.environment.items():
        monkeypatch.setenv(name, value)
    steps = {3, 7, 11}
    items = check_bucket(uninterrupted.place, steps)
    assert all(item.state == State.VERIFIED for item in items)
    check_loadable(pull_all(uninterrupted.place, steps, tmp_path / "pulled"))
