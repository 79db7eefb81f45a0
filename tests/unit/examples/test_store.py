"""The demo's watch of its store: complete checkpoints are counted, partial ones are noticed."""

from __future__ import annotations

from pathlib import Path

from examples.demo.store import StoreWatch
from holdfast.image.manifest import Manifest, State

IMAGE = b"x" * 100


def manifest(step: int, state: State = State.DURABLE) -> Manifest:
    return Manifest(
        run="run",
        attempt=1,
        step=step,
        file=f"step-{step:09d}.pt",
        state=state,
        image_bytes=len(IMAGE),
        image_crc32=0,
        chunk_bytes=4096,
        chunk_crc32s=(0,),
        ranks=2,
        layout_digest="0",
        write_id="w",
        created="2026-01-01T00:00:00Z",
        pgt1_seconds=0.1,
        pgt2_seconds=0.2,
        entries=(),
        tensors=(),
    )


def publish(folder: Path, record: Manifest, content: bytes = IMAGE) -> None:
    (folder / record.file).write_bytes(content)
    (folder / record.file).with_suffix(".json").write_bytes(record.to_bytes())


def test_whole_checkpoints_are_seen_and_remembered_after_retention(tmp_path: Path) -> None:
    watch = StoreWatch(tmp_path)
    publish(tmp_path, manifest(5))
    watch.look()
    publish(tmp_path, manifest(5, State.VERIFIED))
    publish(tmp_path, manifest(9))
    watch.look()
    assert watch.seen["step-000000005.json"].state is State.VERIFIED
    for path in tmp_path.glob("step-000000005.*"):
        path.unlink()
    assert [file.name for file in watch.published()] == ["step-000000009.pt"]
    assert [record.step for record in watch.seen.values()] == [5, 9]
    assert watch.partial == []
    assert watch.strangers() == []


def test_a_manifest_whose_file_is_short_or_missing_is_noticed(tmp_path: Path) -> None:
    watch = StoreWatch(tmp_path)
    publish(tmp_path, manifest(5), IMAGE[:-1])
    (tmp_path / "step-000000006.json").write_bytes(manifest(6).to_bytes())
    watch.look()
    assert len(watch.partial) == 2
    assert "99 bytes" in "".join(watch.partial)
    assert "without its file" in "".join(watch.partial)


def test_a_torn_manifest_is_noticed(tmp_path: Path) -> None:
    watch = StoreWatch(tmp_path)
    publish(tmp_path, manifest(5))
    whole = (tmp_path / "step-000000005.json").read_bytes()
    (tmp_path / "step-000000005.json").write_bytes(whole[: len(whole) // 2])
    watch.look()
    assert watch.partial


def test_files_without_a_manifest_and_left_over_temporary_ones_are_named(tmp_path: Path) -> None:
    watch = StoreWatch(tmp_path)
    publish(tmp_path, manifest(5))
    private = tmp_path / ".holdfast" / "tmp"
    private.mkdir(parents=True)
    (private / "step-000000009.pt.part").touch()
    (tmp_path / "step-000000009.pt").write_bytes(IMAGE)
    assert watch.strangers() == ["step-000000009.pt"]
    assert watch.unfinished() == [".holdfast/tmp/step-000000009.pt.part"]
