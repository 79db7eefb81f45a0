"""Slices in every kind of store: written by ranks, found, read, made into the file that the stager's way makes."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import cast

import pytest

from holdfast.checkpoints.assembly import assemble
from holdfast.checkpoints.slice_sets import (
    find_sets,
    is_slice_upload,
    layout_name,
    load_set,
    remove_set,
    remove_stale,
    upload_attempt,
)
from holdfast.checkpoints.verification import verify_file
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import State, manifest_name
from holdfast.image.slices import area_bytes, frames_of
from holdfast.store.retrying import RetryBudget, Retrying
from tests.conformance.conftest import Backend
from tests.support.images import Image, from_torch_file, made_up
from tests.support.store_slices import frame_buffer, tier_of, write_frames, write_slices
from trainer_side.tiers.tier import Nearness, Tier


def small(seed: int, ranks: int = 3) -> Image:
    """Some hundreds of frames of pages, all in one part of an upload."""
    return made_up(seed, entries=40, chunk_bytes=4096, ranks=ranks, entry_bytes_max=40_000)


def big(seed: int) -> Image:
    """Some 20 MiB of one rank: three parts of an upload, and frames that two of them share."""
    return made_up(seed, entries=40, chunk_bytes=3 << 20, ranks=1, entry_bytes_max=4 << 20)


def nothing() -> None:
    pass


def test_slices_become_the_very_file_that_the_stager_makes(backend: Backend) -> None:
    image = big(1)
    assert area_bytes(image.layout, 0) > 2 * (8 << 20), "one part only"
    write_slices(backend.store, image, attempt=2, step=7)
    assert backend.leftovers() == []
    (found,) = find_sets(backend.again().list())
    assert found.complete
    done: list[int] = []
    manifest = assemble(
        backend.again(), load_set(backend.store, found), attempt=9, check=nothing, progress=done.append
    )
    assert sum(done) == image.layout.image_bytes
    assert backend.store.read(manifest.file) == image.final
    assert (manifest.order, manifest.state) == (CheckpointId(2, 7), State.DURABLE)
    assert manifest.image_crc32 == zlib.crc32(image.final)
    assert [entry.crc32 for entry in manifest.entries] == [
        zlib.crc32(image.final[entry.offset : entry.end]) for entry in image.layout.entries
    ]
    assert manifest.record["ranks"]["0"]["saved_at_unix"] == 1_700_000_000.0
    remove_set(backend.store, found)
    assert remove_stale(backend.store, 2) == [], "the layout is of a job that may live"
    assert remove_stale(backend.store, 3) == [layout_name(2, image.layout.digest)]
    assert {info.name for info in backend.store.list()} == {manifest.file, manifest_name(manifest.file)}
    assert backend.leftovers() == []


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_real_file_of_torch_comes_out_byte_for_byte(tmp_path: Path, ranks: int) -> None:
    import torch

    from holdfast.store import open_store

    torch.save(
        {"a": torch.arange(9000.0), "b": torch.ones(7), "c": {"d": torch.rand(5000)}}, tmp_path / "x.pt"
    )
    image = from_torch_file(tmp_path / "x.pt", chunk_bytes=4096, ranks=ranks)
    store = open_store(str(tmp_path / "run"))
    write_slices(store, image, attempt=1, step=3)
    (found,) = find_sets(store.list())
    manifest = assemble(store, load_set(store, found), attempt=9, check=nothing)
    data = store.read(manifest.file)
    assert data == (tmp_path / "x.pt").read_bytes()
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    assert verify_file(store, manifest).ok


def test_stored_slices_are_found_and_read_by_ranges(backend: Backend) -> None:
    image = small(2)
    write_slices(backend.store, image, attempt=1, step=5)
    write_slices(backend.store, image, attempt=1, step=9, ranks=[0, 2])
    reader: Tier = tier_of(backend.again(), image, 1)
    kept = reader.kept()
    assert reader.nearness is Nearness.STORE
    assert sorted((one.seal.order, one.seal.rank) for one in kept) == [
        ((1, 5), 0),
        ((1, 5), 1),
        ((1, 5), 2),
        ((1, 9), 0),
        ((1, 9), 2),
    ]
    assert kept[0].seal.order == (1, 9), "newest first"
    for one in kept:
        assert one.layout == image.layout
        for number, frame in enumerate(frames_of(one.layout, one.seal.rank)):
            view = memoryview(bytearray(frame.nbytes))
            reader.read_into(one, frame.offset, view)
            assert view == image.frame(frame.chunk, one.seal.rank)
            assert zlib.crc32(view) == one.seal.frame_crc32s[number]


def test_an_older_slice_goes_for_a_newer_one_and_never_the_newest_complete(backend: Backend) -> None:
    image = small(3, ranks=2)
    tiers = [tier_of(backend.store, image, rank) for rank in range(2)]
    for step in (1, 2, 3):
        for rank, tier in enumerate(tiers):
            writer = tier.begin(1, step)
            assert writer is not None
            other = tier.begin(1, step + 10)
            assert (other is None) == (step > 1), "two slots: one is kept, one is written"
            if other is not None:
                other.abandon()
            write_frames(writer, image, rank)
            assert writer.seal({})
            assert {found.step for found in find_sets(backend.store.list()) if found.complete} >= (
                {step - 1} if step > 1 else set()
            )
        for tier in tiers:
            tier.complete(1, step)
        kept = [(found.step, found.complete) for found in find_sets(backend.store.list())]
        assert kept == [(step, True), (step - 1, True)][: 2 if step > 1 else 1]
    assert backend.leftovers() == []


def test_an_upload_that_is_given_up_leaves_nothing(backend: Backend) -> None:
    image = big(4)
    tier = tier_of(backend.store, image, 0)
    writer = tier.begin(1, 1)
    assert writer is not None
    for number in range(len(frames_of(image.layout, 0)) // 2):
        buffer = frame_buffer(image, 0, number)
        writer.write(number, buffer, 0)
    assert backend.leftovers()
    writer.abandon()
    writer.abandon()
    assert backend.leftovers() == []
    assert find_sets(backend.store.list()) == []
    assert tier.begin(1, 2) is not None


def test_a_sweep_takes_the_uploads_of_dead_attempts_only(backend: Backend) -> None:
    image = small(5, ranks=2)
    writers = []
    for attempt, rank in ((2, 0), (3, 1)):
        impatient = Retrying(cast(Retrying, backend.again()).inner, budget=RetryBudget(attempts_max=2))
        writer = tier_of(impatient, image, rank).begin(attempt, 4)
        assert writer is not None
        write_frames(writer, image, rank, threads=1)
        writers.append(writer)
    store = backend.again()
    store.sweep(is_slice_upload)  # as a flusher that starts: a job may live
    store.sweep(lambda own: (upload_attempt(own) or 99) >= 3)  # as one that was told of attempt 3
    assert writers[1].seal({})
    with pytest.raises(Exception, match="slices/step-000000004-a002"):
        writers[0].seal({})
    assert [found.order for found in find_sets(store.list())] == [(3, 4)]
    writers[0].abandon()
    assert backend.leftovers() == []
