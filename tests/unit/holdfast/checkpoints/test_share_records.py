"""Records in the store by which several flushers of one image communicate."""

from __future__ import annotations

import zlib

import pytest

from holdfast.checkpoints.share_records import (
    ShareRecords,
    ShareSeal,
    ShareStart,
    combine_seals,
    list_share_objects,
    voided_error,
)
from holdfast.errors import DamageError, PeerLost, ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.index import LayoutIndex
from holdfast.image.share_sums import ShareSums, entry_crcs_of
from holdfast.image.shares import ImageShare, Shares
from tests.support.images import made_up
from tests.support.memory_store import MemoryStore

IMAGE = made_up(3, entries=30, chunk_bytes=4096, ranks=2, entry_bytes_max=9000)
INDEX = LayoutIndex(IMAGE.layout)
SHARES = Shares.of(IMAGE.layout, 3, 1)
KEY = CheckpointId(7, 120)


def begun(
    store: MemoryStore, key: CheckpointId = KEY, write_id: str = "w000007-a"
) -> tuple[ShareRecords, ShareStart]:
    layout = IMAGE.layout
    sizes = {"nbytes": layout.image_bytes, "chunk_bytes": layout.chunk_bytes}
    upload = store.begin("step-000000120-a007.pt", **sizes, write_id=write_id)
    start = ShareStart.of(
        key, layout, ImageShare(SHARES, 0), upload, file="step-000000120-a007.pt", write_id=write_id
    )
    return ShareRecords(store, key), start


def sums(share: int) -> ShareSums:
    chunks = SHARES.chunks_of(share)
    crcs = {
        chunk: [zlib.crc32(IMAGE.final[one.offset : one.end]) for one in IMAGE.layout.segments(chunk)]
        for chunk in chunks
    }
    extents = [IMAGE.layout.chunk_extent(chunk) for chunk in chunks]
    chunk_crcs = tuple(zlib.crc32(IMAGE.final[one.offset : one.end]) for one in extents)
    return ShareSums(chunk_crcs, entry_crcs_of(INDEX, chunks, crcs))


def seal_all(records: ShareRecords, start: ShareStart) -> list[ShareSeal]:
    for share in range(3):
        records.put_seal(
            start, ImageShare(SHARES, share), sums(share), staged_at_unix=5.5, record={"stager": {"n": share}}
        )
    found = [records.seal(start, share) for share in range(3)]
    assert None not in found
    return [one for one in found if one is not None]


def test_records_of_one_flusher_are_read_by_the_others_until_they_are_cleared() -> None:
    store = MemoryStore()
    records, start = begun(store)
    assert (records.start(), records.layout(), records.void()) == (None, None, None)
    records.begin(start, IMAGE.layout)
    assert records.start() == start
    assert records.layout() == IMAGE.layout
    assert start.describe_mismatch(IMAGE.layout, SHARES) == ""
    assert records.crcs(start, 1) is None
    records.put_crcs(start, ImageShare(SHARES, 1), sums(1).entry_crcs)
    crcs = records.crcs(start, 1)
    assert crcs is not None
    assert crcs.entry_crcs == sums(1).entry_crcs
    assert records.seal(start, 2) is None
    seals = seal_all(records, start)
    assert [records.seal(start, share) for share in range(3)] == seals
    assert seals[0].record == {"stager": {"n": 0}}
    assert list(list_share_objects(store.list())) == [KEY]
    records.clear(3)
    assert list_share_objects(store.list()) == {}


def test_the_image_of_all_seals_is_that_of_the_bytes() -> None:
    store = MemoryStore()
    records, start = begun(store)
    image = combine_seals(start, seal_all(records, start), INDEX, SHARES)
    assert image.image_crc32 == zlib.crc32(IMAGE.final)
    assert len(image.chunk_crc32s) == IMAGE.layout.chunks
    assert image.entry_crc32s == tuple(
        zlib.crc32(IMAGE.final[one.offset : one.end]) for one in IMAGE.layout.entries
    )


def test_a_seal_of_another_write_is_refused_by_name() -> None:
    store = MemoryStore()
    records, start = begun(store)
    _, other = begun(store, write_id="w000006-b")
    records.put_seal(other, ImageShare(SHARES, 2), sums(2), staged_at_unix=0.0, record={})
    with pytest.raises(ProtocolError, match=r"share 3 of 3 .* write w000006-b, .* expected write w000007-a"):
        records.seal(start, 2)
    records.put_crcs(other, ImageShare(SHARES, 1), sums(1).entry_crcs)
    with pytest.raises(ProtocolError, match="w000006-b"):
        records.crcs(start, 1)


def test_a_gap_an_overlap_and_a_missing_share_are_refused() -> None:
    store = MemoryStore()
    records, start = begun(store)
    seals = seal_all(records, start)
    with pytest.raises(ProtocolError, match="CRCs of 2 shares, expected 3"):
        combine_seals(start, seals[:2], INDEX, SHARES)
    for changes in ({"first_chunk": 1}, {"chunk_crcs": seals[1].chunk_crcs[1:]}, {"layout_digest": "0" * 64}):
        wrong = [seals[0], seals[1].model_copy(update=changes), seals[2]]
        with pytest.raises(ProtocolError, match=r"share 2 of 3 on .* sealed .* nothing is published"):
            combine_seals(start, wrong, INDEX, SHARES)
    with pytest.raises(ProtocolError, match="share 2 of 3"):
        combine_seals(start, [seals[0], seals[2], seals[1]], INDEX, SHARES)


def test_the_first_void_stays_and_says_who_and_why() -> None:
    store = MemoryStore()
    records, start = begun(store)
    records.begin(start, IMAGE.layout)
    records.put_void(1, "its disk is gone")
    records.put_void(2, "something else")
    void = records.void()
    assert void is not None
    assert (void.index, void.reason) == (1, "its disk is gone")
    assert "share 2, on " in str(voided_error(void))
    assert "its disk is gone" in str(voided_error(void))
    records.clear(3, keep_void=True)
    assert [name.rpartition(".")[2] for name in store.objects] == ["void"]


def test_a_share_that_was_given_up_is_begun_no_more_and_the_seals_alone_say_so() -> None:
    store = MemoryStore()
    records, start = begun(store)
    seal_all(records, start)
    store.delete(".holdfast/shares/a000007-s000000120.seal-2")
    assert records.put_void(1, "its disk is gone")
    assert records.put_void(1, "said again")
    with pytest.raises(PeerLost, match=r"share 2, on .* its disk is gone"):
        records.seal(start, 1)
    with pytest.raises(PeerLost, match=r"share 2, on .* its disk is gone"):
        records.require_not_voided(1)
    records.require_not_voided(0)
    records.require_not_voided(2)


def test_a_share_that_is_sealed_is_given_up_by_the_lead_alone() -> None:
    store = MemoryStore()
    records, start = begun(store)
    seals = seal_all(records, start)
    assert not records.put_void(1, "its disk is gone")
    assert (records.seal(start, 1), records.void()) == (seals[1], None)
    assert records.put_void(0, "its disk is gone")
    with pytest.raises(PeerLost, match="share 1, on "):
        records.seal(start, 0)
    assert records.void() is not None


def test_a_seal_of_an_upload_before_this_one_is_replaced() -> None:
    store = MemoryStore()
    records, start = begun(store)
    _, other = begun(store, write_id="w000006-b")
    records.put_seal(other, ImageShare(SHARES, 1), sums(1), staged_at_unix=0.0, record={})
    made = records.put_seal(start, ImageShare(SHARES, 1), sums(1), staged_at_unix=0.0, record={})
    assert records.seal(start, 1) == made


@pytest.mark.parametrize("name", ["start", "crcs-2", "seal-2", "void"])
def test_a_record_that_is_none_of_ours_is_our_error(name: str) -> None:
    store = MemoryStore()
    records, start = begun(store)
    full = f".holdfast/shares/a000007-s000000120.{name}"

    def read() -> None:
        records.start(), records.crcs(start, 1), records.seal(start, 1), records.void()

    store.objects[full] = b"{}"
    with pytest.raises(DamageError, match=name):
        read()
    elsewhere, other = begun(store, CheckpointId(7, 121))
    elsewhere.begin(other, IMAGE.layout)
    elsewhere.put_crcs(other, ImageShare(SHARES, 1), ())
    elsewhere.put_seal(other, ImageShare(SHARES, 1), sums(1), staged_at_unix=0.0, record={})
    elsewhere.put_void(2, "")
    store.objects[full] = store.objects[full.replace("120", "121")]
    with pytest.raises(ProtocolError, match=r"step 121 \(attempt 7\), expected step 120"):
        read()


def test_a_start_with_another_split_is_named() -> None:
    _, start = begun(MemoryStore())
    said = start.describe_mismatch(IMAGE.layout, Shares.of(IMAGE.layout, 2, 2))
    assert "count 3, expected 2" in said
    assert "part_bytes 4096, expected 8192" in said


def test_an_upload_that_nobody_can_join_is_refused() -> None:
    store = MemoryStore()
    store.resumable = False
    with pytest.raises(ProtocolError, match="cannot resume an upload"):
        begun(store)
