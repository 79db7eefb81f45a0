"""A store shared with another job runs at the rest of its rate; later the full rate is back."""

from __future__ import annotations

import time
import zlib
from pathlib import Path

import pytest

from benchmarks.slow_store import limit, slow_store
from holdfast.store.posix import PosixStore
from holdfast.store.posix_upload import PosixUpload


def test_a_part_of_the_rate_is_left_while_another_job_has_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PosixUpload, "write_part", PosixUpload.write_part)  # put back at the end
    waits: list[float] = []
    part = bytes(8192)
    with slow_store(tmp_path, 81920.0) as slow:
        shape = slow.shape(HOLDFAST_EVERY="auto")
        environment = shape["environment"]
        assert environment["HOLDFAST_EVERY"] == "auto"
        limit(float(environment["BENCH_BYTES_PER_SECOND"]), environment["BENCH_SHARE"])
        monkeypatch.setattr(time, "sleep", waits.append)
        store = PosixStore(Path(shape["store"]))
        for name, share in (("a", None), ("b", 0.25), ("c", None)):
            upload = store.begin(name, nbytes=len(part), chunk_bytes=len(part), write_id="w")
            if share is None:
                upload.write_part(0, [memoryview(part)], zlib.crc32(part))
            else:
                with slow.shared(share):
                    upload.write_part(0, [memoryview(part)], zlib.crc32(part))
            upload.publish()
            assert store.read(name) == part
    assert waits == [0.1, 0.4, 0.1]
    assert not list(tmp_path.iterdir())
