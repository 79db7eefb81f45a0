"""The status of a run with several stagers on this machine, when no process lives."""

from __future__ import annotations

from pathlib import Path

from holdfast.ring.directory import runtime_directory
from holdfast.ring.ring import Ring
from operator_side.status.run_watch import RunWatch, find_runs


def left(base: Path, url: str, share: int) -> Path:
    """The ring of a share, from 0, of two."""
    directory = runtime_directory(url, base, share=share)
    directory.mkdir(mode=0o700)
    with Ring.create(directory, chunk_bytes=4096, ring_chunks=8, attempt=3) as made:
        made.record_writers(3, 2)
        made.write_checkpoint(3, 7, "staged", "0" * 64, {})
    return directory


def test_rings_of_one_run_are_one_run_and_each_without_a_flusher_is_told_with_its_command(
    tmp_path: Path,
) -> None:
    url = str(tmp_path / "run")
    lead, member = (left(tmp_path, url, share) for share in range(2))
    assert find_runs(tmp_path) == [lead]
    notes = RunWatch(lead, url).poll().notes
    assert any(f"run `holdfast flusher --store {url} --share 1/2`" in note for note in notes)
    assert any(
        f"the ring of share 2 has checkpoints and no flusher; run `holdfast flusher --store {url} --share 2/2`"
        in note
        for note in notes
    )
    assert any("--share 2/2`" in note for note in RunWatch(member, url).poll().notes)
    for path in lead.iterdir():
        path.unlink()
    assert find_runs(tmp_path) == [member]
