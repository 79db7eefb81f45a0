"""A catalog of many checkpoints in a directory: listing all, and finding the one to restore.

python -m benchmarks.growing.cataloguing RUN LOOK    one look, in a process of its own
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.lease import Lease
from holdfast.image.manifest import EntryRecord, Manifest, State, TensorRecord, manifest_name, step_file_name
from holdfast.store import open_store
from holdfast.store.base import Store
from operator_side.commands.ls import ls

__all__ = ["catalogue"]

_CHUNK_BYTES = 1 << 24
_TENSOR_BYTES = 4096
_SECONDS_MAX = 1200


def catalogue(checkpoints: int, tensors: int) -> dict[str, dict[str, float]]:
    """Return CPU seconds, peak resident bytes and manifests read of a process, for each kind of look at one run.

    Args:
        checkpoints: Number of checkpoints, whose files are sparse.
        tensors: Number of tensors in each manifest.
    """
    with tempfile.TemporaryDirectory() as folder:
        claimed, unclaimed = Path(folder) / "claimed", Path(folder) / "unclaimed"
        claimed.mkdir()
        Lease.acquire(open_store(str(claimed))).release()
        _fill(claimed, checkpoints, tensors)
        unclaimed.mkdir()
        for path in claimed.iterdir():
            if path.is_file():
                os.link(path, unclaimed / path.name)
        found = {what: _look(claimed, what) for what in _LOOKS}
        return {**found, "the newest good one, names do not tell attempts": _look(unclaimed, _NEWEST)}


def _fill(run: Path, checkpoints: int, tensors: int) -> None:
    image_bytes = tensors * _TENSOR_BYTES
    entries = tuple(
        EntryRecord(name=f"archive/data/{n}", offset=n * _TENSOR_BYTES, nbytes=_TENSOR_BYTES, crc32=n * 7919)
        for n in range(tensors)
    )
    rows = tuple(
        TensorRecord(path=f"model/layers.{n}.attention.weight", dtype="float32", shape=(32, 32), entry=n)
        for n in range(tensors)
    )
    for step in range(1, checkpoints + 1):
        manifest = Manifest(
            run="run",
            attempt=1,
            step=step,
            file=step_file_name(step),
            state=State.VERIFIED,
            image_bytes=image_bytes,
            image_crc32=step,
            chunk_bytes=_CHUNK_BYTES,
            chunk_crc32s=(step,) * -(-image_bytes // _CHUNK_BYTES),
            ranks=8,
            layout_digest="0" * 64,
            write_id=f"write-{step}",
            created="2026-01-02T03:04:05+00:00",
            pgt1_seconds=0.25,
            pgt2_seconds=0.5,
            entries=entries,
            tensors=rows,
        )
        (run / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())
        with (run / manifest.file).open("wb") as file:
            file.truncate(image_bytes)


def _list_all(store: Store) -> None:
    ls.main([str(store.url)], standalone_mode=False)


def _find_newest(store: Store) -> None:
    Catalog(store).get()


_NEWEST = "the newest good one"
_LOOKS: dict[str, Callable[[Store], None]] = {"`holdfast ls`, all of them": _list_all, _NEWEST: _find_newest}


def _look(run: Path, what: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.growing.cataloguing", str(run), what],
        stdout=subprocess.PIPE,
        check=True,
        timeout=_SECONDS_MAX,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(run: str, what: str) -> dict[str, float]:
    read = Counter[bool]()

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".json"):
            read[True] += 1

    sys.addaudithook(hear)
    before = resource.getrusage(resource.RUSAGE_SELF)
    _LOOKS[what](open_store(run))
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "resident_bytes": _most_resident_bytes(),
        "files_opened": read[True],
    }


def _most_resident_bytes() -> int:
    """Return this program's peak; `ru_maxrss` would include the process before its exec."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(*sys.argv[1:])) + "\n")
