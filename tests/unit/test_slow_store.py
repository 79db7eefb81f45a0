"""A store shared with another job runs at the rest of its rate; later the full rate is back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.slow_store import slow_store
from tests.support.throttled_site.sitecustomize import ThrottledFileSystem


def test_a_part_of_the_rate_is_left_while_another_job_has_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with slow_store(tmp_path, 100.0) as slow:
        shape = slow.shape(HOLDFAST_EVERY="auto")
        assert shape["environment"]["HOLDFAST_EVERY"] == "auto"
        for name, value in shape["environment"].items():
            if name.startswith("THROTTLED_"):
                monkeypatch.setenv(name, value)
        store = ThrottledFileSystem()  # type: ignore[no-untyped-call]
        place = shape["store"].removeprefix("throttled://")
        Path(place).mkdir()
        store.pipe_file(f"{place}/a", bytes(50))
        with slow.shared(0.25):
            store.pipe_file(f"{place}/b", bytes(50))
        store.pipe_file(f"{place}/c", bytes(50))
        assert Path(place, "b").stat().st_size == 50
    assert waits == [0.5, 2.0, 0.5]
    assert not list(tmp_path.iterdir())
