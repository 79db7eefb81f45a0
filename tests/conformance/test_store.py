"""Rules for every store backend: one suite, with each promise of `holdfast.store.base` at least once."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.crc import crc32
from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.store.base import InterruptedUpload, ObjectInfo, Store, Upload
from tests.conformance.conftest import Backend

_CHUNK_BYTES = 1 << 20


def _image(nbytes: int, seed: int = 7) -> memoryview:
    """Return random bytes in page-aligned memory, like the ring's."""
    memory = mmap.mmap(-1, -(-nbytes // 4096) * 4096)
    memory[:nbytes] = random.Random(seed).randbytes(nbytes)
    return memoryview(memory)[:nbytes]


def _part_bytes(store: Store) -> int:
    """Return the part size of small images on this backend."""
    upload = store.begin("probe.pt", nbytes=1, chunk_bytes=_CHUNK_BYTES, write_id="probe")
    upload.abort()
    return upload.part_bytes


def _begin(store: Store, name: str, nbytes: int, write_id: str = "w1") -> Upload:
    return store.begin(name, nbytes=nbytes, chunk_bytes=_CHUNK_BYTES, write_id=write_id)


def _send(upload: Upload, image: memoryview, index: int) -> None:
    piece = image[index * upload.part_bytes : (index + 1) * upload.part_bytes]
    chunks = [piece[start : start + _CHUNK_BYTES] for start in range(0, len(piece), _CHUNK_BYTES)]
    upload.write_part(index, chunks, crc32(piece))


def _send_all(upload: Upload, image: memoryview, order: Sequence[int] | None = None) -> None:
    for index in order or range(-(-len(image) // upload.part_bytes)):
        _send(upload, image, index)


def test_a_new_run_is_empty_and_passes_the_checks(backend: Backend) -> None:
    assert backend.store.list() == []
    backend.store.check(write=False)
    backend.store.check(write=True)
    assert backend.store.list() == []
    assert backend.leftovers() == []


def test_small_objects_are_written_replaced_read_and_deleted(backend: Backend) -> None:
    store = backend.store
    store.write("step-000000001.json", b"first")
    store.write("step-000000001.json", b"second")
    assert backend.again().read("step-000000001.json") == b"second"
    assert store.size("step-000000001.json") == 6
    store.write("empty", b"")
    assert store.read("empty") == b""
    store.delete("step-000000001.json")
    store.delete("step-000000001.json")
    assert [info.name for info in store.list()] == ["empty"]
    assert backend.leftovers() == []


def test_listing_is_sorted_recursive_and_includes_claims(backend: Backend) -> None:
    names = ["step-000000002.json", ".holdfast/writer-000007.json", "step-000000001.json", "logs/a/b.json"]
    for name in names:
        backend.store.write(name, name.encode())
    expected = [ObjectInfo(name, len(name)) for name in sorted(names)]
    assert backend.store.list() == expected
    assert backend.again().list() == expected


@pytest.mark.parametrize(
    "name", ["../out", "/etc/passwd", "a/../b", "a//b", "", ".", "a\0b", "a\\b", ".holdfast/tmp/x", "n" * 600]
)
def test_names_that_lead_out_of_the_run_are_refused(backend: Backend, name: str) -> None:
    store = backend.store
    with pytest.raises(StoreError, match="is refused"):
        store.write(name, b"x")
    with pytest.raises(StoreError, match="is refused"):
        store.read(name)
    with pytest.raises(StoreError, match="is refused"):
        store.delete(name)
    with pytest.raises(StoreError, match="is refused"):
        _begin(store, name, 1)


def test_reading_a_missing_object_raises_store_missing(backend: Backend) -> None:
    store = backend.store
    store.write("there", b"x")
    for call in (
        lambda: store.read("nothing"),
        lambda: store.size("nothing"),
        lambda: store.read_into("nothing", 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(StoreMissing, match="nothing"):
            call()


def test_create_is_taken_by_the_first(backend: Backend) -> None:
    name = ".holdfast/writer-000001.json"
    assert backend.store.create(name, b"mine")
    assert not backend.again().create(name, b"yours")
    assert backend.store.read(name) == b"mine"
    assert backend.leftovers() == []


def test_create_has_at_most_one_winner_left_standing(backend: Backend) -> None:
    """Not every server is atomic, but the remaining object belongs to a writer that was told it won."""
    if backend.name == "swift":
        pytest.skip(
            "Swift's If-None-Match is not atomic: two may read themselves back in turn; the fencing watches for it"
        )
    if backend.name == "memory":
        pytest.skip("fsspec's memory file system looks first and writes afterwards")
    barrier = threading.Barrier(4)

    def claim(caller: int) -> bool:
        barrier.wait()
        return backend.store.create("claim", b"caller %d" % caller)

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(claim, range(4)))
    assert told.count(True) == 1
    assert backend.store.read("claim") == b"caller %d" % told.index(True)


@pytest.mark.parametrize(
    "size", ["1 byte", "one part", "one part and 1 byte", "several parts", "an odd tail"]
)
def test_images_of_every_size_come_back(backend: Backend, size: str) -> None:
    part = _part_bytes(backend.store)
    nbytes = {
        "1 byte": 1,
        "one part": part,
        "one part and 1 byte": part + 1,
        "several parts": 3 * part,
        "an odd tail": 2 * part + 4097,
    }[size]
    image = _image(nbytes)
    upload = _begin(backend.store, "step-000000009.pt", nbytes)
    assert upload.part_bytes % _CHUNK_BYTES == 0
    _send_all(upload, image)
    upload.publish()
    assert backend.store.list() == [ObjectInfo("step-000000009.pt", nbytes)]
    assert backend.again().read("step-000000009.pt") == image
    assert backend.leftovers() == []


def test_parts_come_in_any_order_and_from_threads(backend: Backend) -> None:
    image = _image(3 * _part_bytes(backend.store) + 100)
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    _send(upload, image, 3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda index: _send(upload, image, index), (2, 0, 1)))
    upload.publish()
    assert backend.store.read("step-000000001.pt") == image


def test_an_upload_is_invisible_before_publish(backend: Backend) -> None:
    image = _image(_part_bytes(backend.store) + 10)
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    _send_all(upload, image)
    assert backend.store.list() == []
    with pytest.raises(StoreMissing):
        backend.store.size("step-000000001.pt")
    upload.publish()
    assert backend.store.size("step-000000001.pt") == len(image)


def test_a_part_sent_again_replaces_the_first(backend: Backend) -> None:
    part = _part_bytes(backend.store)
    wrong, right = _image(part + 5, seed=1), _image(part + 5, seed=2)
    upload = _begin(backend.store, "step-000000001.pt", part + 5)
    _send_all(upload, wrong)
    _send_all(upload, right, order=[1, 0])
    upload.publish()
    assert backend.store.read("step-000000001.pt") == right


def test_publishing_twice_is_publishing_once(backend: Backend) -> None:
    image = _image(100)
    upload = _begin(backend.store, "step-000000001.pt", 100)
    _send_all(upload, image)
    upload.publish()
    upload.publish()
    upload.abort()
    assert backend.store.read("step-000000001.pt") == image


def test_publishing_where_a_file_stands_leaves_one_of_the_two_whole(backend: Backend) -> None:
    """POSIX refuses; other stores replace the file, as they cannot detect it."""
    older = b"older" * 1000
    backend.store.write("step-000000001.pt", older)
    image = _image(77)
    upload = _begin(backend.store, "step-000000001.pt", 77)
    _send_all(upload, image)
    if backend.name == "posix":
        with pytest.raises(StoreError, match="is left as it is") as caught:
            upload.publish()
        assert caught.value.begin_anew
        assert backend.leftovers() == []
    else:
        upload.publish()
    assert backend.store.read("step-000000001.pt") == (older if backend.name == "posix" else image)


def test_an_incomplete_upload_is_not_published(backend: Backend) -> None:
    image = _image(2 * _part_bytes(backend.store))
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    _send(upload, image, 1)
    with pytest.raises(StoreError, match="1 of 2 parts are missing"):
        upload.publish()
    assert backend.store.list() == []
    _send(upload, image, 0)
    upload.publish()
    assert backend.store.read("step-000000001.pt") == image


def test_parts_of_wrong_size_or_number_are_refused(backend: Backend) -> None:
    image = _image(2 * _part_bytes(backend.store))
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    for index, nbytes in ((0, upload.part_bytes - 1), (2, 1), (-1, upload.part_bytes)):
        with pytest.raises(StoreError, match="part"):
            upload.write_part(index, [image[:nbytes]], crc32(image[:nbytes]))
    upload.abort()


def test_abort_leaves_nothing_and_may_be_repeated(backend: Backend) -> None:
    image = _image(2 * _part_bytes(backend.store))
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    _send(upload, image, 0)
    upload.abort()
    upload.abort()
    assert backend.store.list() == []
    assert backend.leftovers() == []
    with pytest.raises(StoreError, match="over"):
        _send(upload, image, 1)
    assert backend.leftovers() == []


def test_ranges_are_read_into_memory(backend: Backend) -> None:
    image = _image(3 * _part_bytes(backend.store) + 123)
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    _send_all(upload, image)
    upload.publish()
    for offset, nbytes in (
        (0, 1),
        (5, 4096),
        (upload.part_bytes - 3, 2_000_001),
        (len(image) - 7, 7),
        (0, len(image)),
        (9, 0),
    ):
        target = bytearray(nbytes + 2)
        backend.store.read_into("step-000000001.pt", offset, memoryview(target)[1 : nbytes + 1])
        assert target[1:-1] == image[offset : offset + nbytes]
        assert target[0] == target[-1] == 0


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 11), (8, 5), (10, 1), (5000, 10)])
def test_a_read_beyond_the_end_is_damage(backend: Backend, offset: int, nbytes: int) -> None:
    backend.store.write("short", b"0123456789")
    with pytest.raises(DamageError, match="truncated"):
        backend.store.read_into("short", offset, memoryview(bytearray(nbytes)))


def test_sweep_removes_what_is_unfinished_except_what_is_kept(backend: Backend) -> None:
    part = _part_bytes(backend.store)
    image = _image(part + 1)
    backend.store.write("step-000000001.json", b"stays")
    dead, alive = (
        _begin(backend.store, "dead.pt", part + 1, "dead"),
        _begin(backend.store, "alive.pt", part + 1, "alive"),
    )
    _send(dead, image, 0)
    _send(alive, image, 0)
    removed = backend.again().sweep(keep={"alive"})
    assert any("dead" in words for words in removed)
    assert not any("alive" in words for words in removed)
    _send(alive, image, 1)
    alive.publish()
    assert [info.name for info in backend.store.list()] == ["alive.pt", "step-000000001.json"]
    assert backend.store.read("alive.pt") == image
    assert backend.store.sweep() == []
    assert backend.leftovers() == []
    dead.abort()


def test_two_runs_side_by_side_do_not_see_each_other(backend: Backend) -> None:
    """`run` must not list files of `run2`, although the names share a prefix."""
    from holdfast.store import open_store
    from holdfast.store.retrying import Retrying

    other = open_store(backend.store.url + "2")
    other.write("theirs", b"x")
    upload = _begin(other, "theirs.pt", 10)
    assert backend.store.list() == []
    assert backend.store.sweep() == []
    _send_all(upload, _image(10))
    upload.publish()
    assert [info.name for info in other.list()] == ["theirs", "theirs.pt"]
    assert isinstance(other, Retrying)
    other.close()


def test_sizes_that_are_none_are_refused(backend: Backend) -> None:
    for nbytes in (0, -1):
        with pytest.raises(StoreError, match="at least 1"):
            _begin(backend.store, "step-000000001.pt", nbytes)
    assert backend.leftovers() == []


def _resume(
    backend: Backend,
    upload: Upload,
    nbytes: int,
    *,
    name: str = "step-000000001.pt",
    write_id: str = "w1",
    token: str | None = None,
    crc32s: dict[int, int] | None = None,
) -> Upload:
    """Resume `upload` as the next process would: through another store object, from the upload's record."""
    assert upload.token is not None
    return backend.again().resume(
        name,
        InterruptedUpload(
            nbytes, upload.part_bytes, write_id, upload.token if token is None else token, crc32s or {}
        ),
    )


def test_an_upload_goes_on_in_the_next_process(backend: Backend) -> None:
    image = _image(3 * _part_bytes(backend.store) + 77)
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    assert upload.written() == frozenset()
    _send(upload, image, 3)
    _send(upload, image, 1)
    assert upload.written() == {1, 3}
    assert not upload.published
    around = backend.leftovers()
    assert backend.again().sweep(keep={"w1"}) == []
    assert backend.leftovers() == around
    second = _resume(backend, upload, len(image))
    assert (second.token, second.part_bytes, second.published) == (upload.token, upload.part_bytes, False)
    # A file does not say which parts were written.
    assert second.written() == ({0, 1, 2, 3} if backend.name == "posix" else {1, 3})
    assert backend.store.list() == []
    _send_all(second, image, order=[0, 2])
    second.publish()
    assert second.published
    assert second.written() == {0, 1, 2, 3}
    assert backend.store.read("step-000000001.pt") == image
    assert backend.leftovers() == []


def test_an_upload_may_pass_through_many_processes(backend: Backend) -> None:
    image = _image(3 * _part_bytes(backend.store))
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    for index in range(3):
        upload = _resume(backend, upload, len(image))
        _send(upload, image, index)
    twice = [_resume(backend, upload, len(image)) for _ in range(2)]
    twice[0].publish()
    assert _resume(backend, upload, len(image)).published
    assert backend.store.read("step-000000001.pt") == image
    assert backend.leftovers() == []


def test_several_processes_write_one_upload_at_a_time_and_one_publishes(backend: Backend) -> None:
    image = _image(4 * _part_bytes(backend.store) + 99)
    begun = _begin(backend.store, "step-000000001.pt", len(image))
    others = [_resume(backend, begun, len(image)) for _ in range(2)]
    for upload, parts in zip([begun, *others], ([1, 0], [2, 3], [4]), strict=True):
        _send_all(upload, image, order=parts)
    for upload in [*others, begun]:
        upload.hand_over()
        upload.hand_over()
        with pytest.raises(StoreError, match="the upload is over"):
            _send(upload, image, 0)
    size = begun.part_bytes
    crc32s = {index: crc32(image[index * size : (index + 1) * size]) for index in range(5)}
    last = _resume(backend, begun, len(image), crc32s=crc32s)
    assert last.written() == {0, 1, 2, 3, 4}
    last.publish()
    assert backend.store.read("step-000000001.pt") == image
    assert backend.leftovers() == []


def test_an_upload_that_was_handed_over_can_be_taken_back(backend: Backend) -> None:
    image = _image(_part_bytes(backend.store) + 1)
    begun = _begin(backend.store, "step-000000001.pt", len(image))
    _send_all(begun, image)
    begun.hand_over()
    begun.abort()
    assert backend.store.list() == []
    assert backend.leftovers() == []


def test_a_part_written_again_after_the_resume_replaces_the_first(backend: Backend) -> None:
    part = _part_bytes(backend.store)
    wrong, right = _image(part + 5, seed=1), _image(part + 5, seed=2)
    upload = _begin(backend.store, "step-000000001.pt", part + 5)
    _send_all(upload, wrong)
    second = _resume(backend, upload, part + 5)
    _send_all(second, right, order=[1, 0])
    second.publish()
    assert backend.store.read("step-000000001.pt") == right


def test_a_published_upload_is_resumed_as_such(backend: Backend) -> None:
    image = _image(_part_bytes(backend.store) + 1)
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    _send_all(upload, image)
    upload.publish()
    second = _resume(backend, upload, len(image))
    assert second.published
    assert second.written() == {0, 1}
    second.publish()
    second.abort()
    with pytest.raises(StoreError, match="over"):
        _send(second, image, 0)
    assert backend.again().read("step-000000001.pt") == image
    assert backend.leftovers() == []


@pytest.mark.parametrize("end", ["swept", "aborted"])
@pytest.mark.parametrize("older", [False, True])
def test_an_upload_that_is_gone_is_missing(backend: Backend, end: str, older: bool) -> None:
    """Also if an older file of the same size has the name."""
    image = _image(_part_bytes(backend.store) + 1)
    if older:
        before = _begin(backend.store, "step-000000001.pt", len(image), "w0")
        _send_all(before, image)
        before.publish()
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    _send(upload, image, 0)
    if end == "swept":
        backend.again().sweep()
    else:
        upload.abort()
    with pytest.raises(StoreMissing, match=r"step-000000001\.pt.*start over") as caught:
        _resume(backend, upload, len(image))
    assert caught.value.begin_anew
    assert not caught.value.retriable
    upload.abort()
    assert backend.leftovers() == []


@pytest.mark.parametrize(
    "token", ["", "garbage", "inode-1", "new-0123456789abcdef", "../../x?y=z&a", "\u00e9", "x" * 2000]
)
def test_a_token_of_no_upload_is_missing_and_harms_none(backend: Backend, token: str) -> None:
    image = _image(_part_bytes(backend.store) + 1)
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    _send(upload, image, 0)
    with pytest.raises(StoreMissing, match="start over") as caught:
        _resume(backend, upload, len(image), token=token)
    assert caught.value.begin_anew
    _send(upload, image, 1)
    upload.publish()
    assert backend.store.read("step-000000001.pt") == image
    assert backend.leftovers() == []


def test_the_token_of_another_upload_is_missing(backend: Backend) -> None:
    if backend.name == "moto":
        pytest.skip("moto finds an upload by its id alone, whatever the key")
    image = _image(100)
    ours = _begin(backend.store, "step-000000001.pt", 100, "ours")
    theirs = _begin(backend.store, "step-000000002.pt", 100, "theirs")
    with pytest.raises(StoreMissing):
        _resume(backend, theirs, 100, write_id="ours")
    _send_all(ours, image)
    ours.publish()
    theirs.abort()


def test_a_part_of_another_size_does_not_count(backend: Backend) -> None:
    """The caller names the part size; parts of another size in the store do not count."""
    part = _part_bytes(backend.store)
    image, other_bytes = _image(3 * part), part + _CHUNK_BYTES
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    _send(upload, image, 0)
    assert upload.token is not None
    second = backend.again().resume(
        "step-000000001.pt", InterruptedUpload(len(image), other_bytes, "w1", upload.token)
    )
    everything = frozenset(range(-(-len(image) // other_bytes)))
    assert second.written() == (everything if backend.name == "posix" else frozenset())
    _send_all(second, image)
    second.publish()
    assert backend.store.read("step-000000001.pt") == image


def test_a_part_that_is_known_to_have_another_crc_does_not_count(backend: Backend) -> None:
    if backend.name in ("posix", "swift", "moto"):
        pytest.skip("keeps no CRC of a part")
    image = _image(2 * _part_bytes(backend.store))
    upload = _begin(backend.store, "step-000000001.pt", len(image))
    _send_all(upload, image)
    right = crc32(image[: upload.part_bytes])
    second = _resume(backend, upload, len(image), crc32s={0: right, 1: right})
    assert second.written() == {0}
    _send(second, image, 1)
    second.publish()
    assert backend.store.read("step-000000001.pt") == image


def test_resume_asks_for_names_and_write_ids_that_can_be_ours(backend: Backend) -> None:
    upload = _begin(backend.store, "step-000000001.pt", 10)
    with pytest.raises(StoreError, match="is refused"):
        _resume(backend, upload, 10, name="../out")
    with pytest.raises(StoreError, match="is refused"):
        _resume(backend, upload, 10, write_id="a/b")
    upload.abort()
