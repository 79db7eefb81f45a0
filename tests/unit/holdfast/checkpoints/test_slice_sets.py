"""Slices in a store, by name and by what is in them: nothing that comes from outside is believed."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoints.assembly import assemble
from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.lease import Lease
from holdfast.checkpoints.slice_sets import (
    SEAL_BYTES_MAX,
    SliceName,
    find_sets,
    layout_name,
    load_set,
    read_layout,
    read_seal,
    remove_set,
    remove_stale,
    slice_write_id,
    upload_attempt,
)
from holdfast.errors import DamageError, FencedError, HoldfastError, StoreError, StoreMissing
from holdfast.image.layout import Layout
from holdfast.image.manifest import is_manifest_name
from holdfast.image.slices import SliceSeal, frames_of
from holdfast.store.base import ObjectInfo
from holdfast.store.names import check_name
from tests.support.images import made_up
from tests.support.memory_store import MemoryStore
from tests.support.store_slices import write_slices

IMAGE = made_up(2, entries=9, chunk_bytes=4096, ranks=3, entry_bytes_max=9000)
OTHER = made_up(3, entries=9, chunk_bytes=4096, ranks=3, entry_bytes_max=9000)


def nothing() -> None:
    pass


def seal_of(store: MemoryStore, name: SliceName, **changes: Any) -> None:
    """Change a seal, with a CRC that fits."""
    seal = SliceSeal.from_bytes(store.objects[name.seal], source="x")
    store.objects[name.seal] = seal.model_copy(update=changes).to_bytes()


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    write_slices(made, IMAGE, attempt=2, step=7)
    return made


@given(
    st.integers(1, 2**62 - 1).filter(lambda n: n < 10**18),
    st.integers(0, 10**18),
    st.integers(1, 2**31 - 1),
    st.data(),
)
def test_names_are_read_back_and_confuse_nobody(
    attempt: int, step: int, ranks: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    name = SliceName(attempt, step, rank, ranks)
    for text in (name.slice, name.seal):
        check_name(text)
        assert not is_manifest_name(text)
        assert not text.endswith(".pt")
        (found,) = find_sets([ObjectInfo(text, 5)])
        assert found.names() == [name]
        assert found.complete == (ranks == 1 and text == name.seal)
    assert upload_attempt(slice_write_id(name, "00ff")) == attempt


@given(st.text(alphabet="slices/tep-0123456789arofl.j/\\~\0", max_size=60))
def test_any_other_name_is_no_slice(text: str) -> None:
    for found in find_sets([ObjectInfo(text, 1), ObjectInfo(f"slices/{text}", 1)]):
        assert found.names()[0].slice in {text, f"slices/{text}"} or found.names()[0].seal


@pytest.mark.parametrize(
    "text",
    [
        "slices/step-000000007-a002-r00003of00003.slice",  # of three, there is no fourth
        "slices/step-000000007-a002-r00001of99999999999.slice",
        "slices/step-0000000007-a002-r00001of00003.slice",  # as nobody writes it
        "slices/step-000000007-a000-r00001of00003.slice",
        "slices/../step-000000007-a002-r00001of00003.slice",
        "deep/slices/step-000000007-a002-r00001of00003.slice",
    ],
)
def test_names_that_nobody_writes_are_passed_over(text: str) -> None:
    assert find_sets([ObjectInfo(text, 1)]) == []


def test_a_whole_set_is_loaded(store: MemoryStore) -> None:
    (found,) = find_sets(store.list())
    loaded = load_set(store, found)
    assert loaded.layout == IMAGE.layout
    assert [seal.rank for seal in loaded.seals] == [0, 1, 2]
    assert assemble(store, loaded, attempt=9, check=nothing).order == (2, 7)
    assert store.objects["step-000000007-a002.pt"] == IMAGE.final


def break_seal_missing(store: MemoryStore) -> str:
    del store.objects[SliceName(2, 7, 1, 3).seal]
    return "2 of 3 ranks have sealed"


def break_slice_missing(store: MemoryStore) -> str:
    del store.objects[SliceName(2, 7, 1, 3).slice]
    return "r00001of00003.slice: 0 bytes"


def break_slice_short(store: MemoryStore) -> str:
    name = SliceName(2, 7, 2, 3).slice
    store.objects[name] = store.objects[name][:-1]
    return "r00002of00003.slice: "


def break_layout_missing(store: MemoryStore) -> str:
    del store.objects[layout_name(2, IMAGE.layout.digest)]
    return "gone"


def break_layout_other(store: MemoryStore) -> str:
    store.objects[layout_name(2, IMAGE.layout.digest)] = OTHER.layout.to_bytes()
    return "renamed or altered"


def break_layout_garbage(store: MemoryStore) -> str:
    store.objects[layout_name(2, IMAGE.layout.digest)] = zlib.compress(b"[" * 100_000)
    return "cannot be read"


def break_layout_of_huge_chunks(store: MemoryStore) -> str:
    huge = Layout(2**61, 2**60, 3, ())
    store.objects[layout_name(2, huge.digest)] = huge.to_bytes()
    for rank in range(3):
        seal_of(store, SliceName(2, 7, rank, 3), layout_digest=huge.digest)
    return "at most"


def break_two_layouts(store: MemoryStore) -> str:
    seal_of(store, SliceName(2, 7, 1, 3), layout_digest=OTHER.layout.digest)
    return "no parts of one image"


def break_two_jobs(store: MemoryStore) -> str:
    seal_of(store, SliceName(2, 7, 1, 3), record={"job": "another"})
    return "two jobs"


def break_digest_is_a_path(store: MemoryStore) -> str:
    for rank in range(3):
        seal_of(store, SliceName(2, 7, rank, 3), layout_digest="../../../etc/passwd")
    return "64 hexadecimal digits"


def break_seal_of_another(store: MemoryStore) -> str:
    store.objects[SliceName(2, 7, 1, 3).seal] = store.objects[SliceName(2, 7, 2, 3).seal]
    return "renamed or copied"


def break_too_few_crcs(store: MemoryStore) -> str:
    seal_of(store, SliceName(2, 7, 0, 3), frame_crc32s=())
    return "0 frame CRCs"


def break_seal_flipped(store: MemoryStore) -> str:
    name = SliceName(2, 7, 0, 3).seal
    data = bytearray(store.objects[name])
    data[30] ^= 1
    store.objects[name] = bytes(data)
    return "truncated or altered"


@pytest.mark.parametrize(
    "damage", [value for name, value in sorted(globals().items()) if name.startswith("break_")]
)
def test_damage_of_any_part_is_named_and_nothing_is_published(store: MemoryStore, damage: Any) -> None:
    said = damage(store)
    before = dict(store.objects)
    (found,) = find_sets(store.list())
    with pytest.raises(DamageError) as caught:
        assemble(store, load_set(store, found), attempt=9, check=nothing)
    assert said in str(caught.value)
    assert store.objects == before
    assert store.open_uploads == []


def test_a_seal_too_large_is_not_read(store: MemoryStore) -> None:
    name = SliceName(2, 7, 0, 3)
    store.objects[name.seal] = bytes(SEAL_BYTES_MAX + 1)
    with pytest.raises(DamageError, match="not read"):
        read_seal(store, name)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_any_flipped_byte_of_a_frame_is_named(store: MemoryStore, rank: int) -> None:
    (found,) = find_sets(store.list())
    loaded, name = load_set(store, found), SliceName(2, 7, rank, 3).slice
    for frame in frames_of(IMAGE.layout, rank):
        whole = store.objects[name]
        for at in {frame.offset, frame.offset + frame.nbytes - 1}:
            data = bytearray(whole)
            data[at] ^= 0x10
            store.objects[name] = bytes(data)
            with pytest.raises(DamageError, match=f"chunk {frame.chunk} .* from rank {rank}") as caught:
                assemble(store, loaded, attempt=9, check=nothing)
            assert name in str(caught.value)
        store.objects[name] = whole
    assert not any(name.startswith("step-") for name in store.objects)
    assert store.open_uploads == []


def test_a_byte_that_is_flipped_on_its_way_once_does_no_harm(store: MemoryStore) -> None:
    (found,) = find_sets(store.list())
    name = SliceName(2, 7, 1, 3).slice
    flipped: list[str] = []
    whole = store.objects[name]

    def before(act: str, what: str) -> None:
        if what == name and act == "read_into":
            store.objects[name] = whole if flipped else bytes([whole[0] ^ 1]) + whole[1:]
            flipped.append(what)

    store.before = before
    assert assemble(store, load_set(store, found), attempt=9, check=nothing).file == "step-000000007-a002.pt"
    assert store.objects["step-000000007-a002.pt"] == IMAGE.final
    assert flipped


@pytest.mark.parametrize("number", range(1, 8))
def test_a_writer_that_lost_the_run_publishes_nothing(store: MemoryStore, number: int) -> None:
    (found,) = find_sets(store.list())
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise FencedError("another")

    with pytest.raises(FencedError):
        assemble(store, load_set(store, found), attempt=9, check=check)
    assert "step-000000007-a002.json" not in store.objects
    assert store.open_uploads == []


@pytest.mark.parametrize("act", ["begin", "write_part", "publish", "read_into"])
def test_a_store_that_fails_keeps_the_slices_and_no_upload(store: MemoryStore, act: str) -> None:
    (found,) = find_sets(store.list())
    loaded = load_set(store, found)

    def before(what: str, name: str) -> None:
        if what == act:
            raise StoreError("full")

    store.before = before
    before_objects = dict(store.objects)
    with pytest.raises(StoreError, match="full"):
        assemble(store, loaded, attempt=9, check=nothing)
    assert store.objects == before_objects
    assert store.open_uploads == []


def test_seals_go_before_slices() -> None:
    store = MemoryStore()
    write_slices(store, IMAGE, attempt=1, step=1)
    (found,) = find_sets(store.list())
    names = remove_set(store, found)
    assert [name.endswith(".seal.json") for name in names] == [True] * 3 + [False] * 3
    assert find_sets(store.list()) == []


def test_half_done_sets_of_dead_jobs_go_and_whole_ones_stay() -> None:
    store = MemoryStore()
    write_slices(store, IMAGE, attempt=1, step=1, ranks=[0])
    write_slices(store, IMAGE, attempt=2, step=5)
    write_slices(store, OTHER, attempt=2, step=6, ranks=[0, 1])
    write_slices(store, IMAGE, attempt=3, step=2, ranks=[2])
    remove_stale(store, 3)
    assert [(found.order, found.complete) for found in find_sets(store.list())] == [
        ((3, 2), False),
        ((2, 5), True),
    ]
    kept = {info.name for info in store.list() if "layout" in info.name}
    assert kept >= {layout_name(2, IMAGE.layout.digest), layout_name(3, IMAGE.layout.digest)}
    assert layout_name(1, IMAGE.layout.digest) not in kept


def test_slices_are_no_checkpoints_of_the_catalog(store: MemoryStore) -> None:
    catalog = Catalog(store)
    assert catalog.list() == []
    with pytest.raises(StoreMissing, match="holdfast assemble memory://store/run"):
        catalog.get()
    write_slices(store, IMAGE, attempt=2, step=9)
    (older,) = [found for found in catalog.slices() if found.step == 7]
    assemble(store, load_set(store, older), attempt=9, check=nothing)
    assert catalog.get().step == 7
    with pytest.raises(StoreMissing, match=r"step 9 is there as slices.*assemble memory://store/run@9"):
        catalog.get(9)


def test_attempts_grow_beyond_those_of_slices() -> None:
    store = MemoryStore()
    write_slices(store, IMAGE, attempt=41, step=7, ranks=[1])
    assert Lease.take(store).attempt == 42


@given(st.binary(max_size=200))
def test_hostile_seals_and_layouts_give_errors_of_ours(data: bytes) -> None:
    store = MemoryStore()
    name, digest = SliceName(1, 1, 0, 1), "0" * 64
    store.objects[name.seal] = store.objects[layout_name(1, digest)] = data
    for call in (lambda: read_seal(store, name), lambda: read_layout(store, 1, digest)):
        with pytest.raises(HoldfastError):
            call()
