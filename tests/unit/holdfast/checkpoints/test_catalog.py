"""The catalog: its order, which checkpoints may be restored, and the reasons why others may not."""

from __future__ import annotations

import logging

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import DamageError, StoreMissing
from holdfast.image.manifest import State
from holdfast.store.base import SMALL_BYTES_MAX
from tests.support.checkpoints import SMALL_TENSORS, add, add_small, manifest_of, small_image
from tests.support.memory_store import MemoryStore


def test_newest_first_by_attempt_then_step() -> None:
    store = MemoryStore()
    add_small(store, 100)
    add_small(store, 300)
    add_small(store, 200, attempt=2)
    assert [item.step for item in Catalog(store).list()] == [200, 300, 100]


def test_only_manifests_count() -> None:
    store = MemoryStore()
    add_small(store, 1)
    for name in (
        ".holdfast/writer-000001.json",
        "step-000000009.pt",
        "notes.txt",
        "deep/step-000000008.json",
    ):
        store.objects[name] = b"x"
    assert [item.step for item in Catalog(store).list()] == [1]


DRIFT = "rank 1 differs from most ranks in model/w"


def test_a_drifted_checkpoint_is_called_so_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    add_small(store, 1)
    add_small(store, 2, state=State.DURABLE, drift=DRIFT)
    catalog = Catalog(store)
    assert [(item.state, item.fault, item.drift) for item in catalog.list()] == [
        ("drifted", "", DRIFT),
        ("verified", "", ""),
    ]
    assert catalog.get().step == 1
    assert f"not used: {DRIFT}" in caplog.text
    assert catalog.get(2).step == 2, "who asks for it gets it"


def test_a_doubtful_checkpoint_is_called_so_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    add_small(store, 1)
    add_small(store, 2, state=State.DURABLE, doubt="step 2 may be torn")
    catalog = Catalog(store)
    assert [(item.state, item.fault, item.doubt) for item in catalog.list()] == [
        ("doubtful", "", "step 2 may be torn"),
        ("verified", "", ""),
    ]
    assert catalog.get().step == 1
    assert "not used: step 2 may be torn" in caplog.text
    assert catalog.get(2).step == 2, "who asks for it gets it"


def test_a_drifted_checkpoint_is_better_than_none(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    add_small(store, 1, state=State.BAD)
    add_small(store, 2, state=State.DURABLE, drift=DRIFT)
    assert Catalog(store).get().step == 2
    assert f"used, as there is no other: {DRIFT}" in caplog.text


def test_catalog_lists_each_state_with_its_fault() -> None:
    store = MemoryStore()
    add_small(store, 1)
    add_small(store, 2, state=State.DURABLE)
    add_small(store, 3, state=State.BAD, note="chunk 1")
    add(store, manifest_of(small_image(), step=4))
    add(store, manifest_of(small_image(), step=5), small_image()[:-1])
    store.objects["step-000000006.json"] = b"{}"
    items = {item.step: item for item in Catalog(store).list()}
    assert {step: item.state for step, item in items.items()} == {
        1: "verified",
        2: "durable",
        3: "bad",
        4: "damaged",
        5: "damaged",
        6: "damaged",
    }
    assert items[1].fault == items[2].fault == ""
    assert "chunk 1" in items[3].fault
    assert "missing" in items[4].fault
    assert f"expected {len(small_image())} bytes, the file has {len(small_image()) - 1}" in items[5].fault
    assert "CRC-32" in items[6].fault
    assert (items[6].manifest, items[6].file_bytes) == (None, None)


def test_the_good_ones_have_no_fault_and_the_others_have_reasons() -> None:
    store = MemoryStore()
    add_small(store, 1)
    add_small(store, 2, state=State.DURABLE)
    add_small(store, 3, state=State.BAD)
    add(store, manifest_of(small_image(), step=4))
    items = Catalog(store).list()
    assert [item.step for item in items if item.manifest is not None and not item.fault] == [2, 1]
    assert [item.step for item in items if item.fault] == [4, 3]
    assert Catalog(store).get().step == 2


def test_a_new_run_has_nothing() -> None:
    catalog = Catalog(MemoryStore())
    assert list(catalog.list()) == []
    with pytest.raises(StoreMissing, match="nothing at this URL"):
        catalog.get()


def test_a_run_without_checkpoints_is_not_a_missing_run() -> None:
    store = MemoryStore()
    store.objects[".holdfast/writer-000001.json"] = b"x"
    with pytest.raises(StoreMissing, match="no checkpoint in this run yet"):
        Catalog(store).get(3)


def test_a_manifest_that_cannot_be_read_stands_where_the_newest_attempt_would() -> None:
    store = MemoryStore()
    add_small(store, 100)
    add_small(store, 10, attempt=2)
    store.objects["step-000000020.json"] = b"?"
    assert [item.step for item in Catalog(store).list()] == [20, 10, 100]


def test_a_manifest_under_another_name_is_not_believed() -> None:
    store = MemoryStore()
    add_small(store, 1)
    store.objects["step-000000009.json"] = store.objects["step-000000001.json"]
    item = Catalog(store).list()[0]
    assert (item.step, item.manifest, item.state) == (9, None, "damaged")
    assert "renamed or copied" in item.fault


def test_a_manifest_under_the_name_of_another_attempt_is_damaged() -> None:
    store = MemoryStore()
    add_small(store, 1)
    store.objects["step-000000001-a002.json"] = store.objects["step-000000001.json"]
    assert {item.name: item.state for item in Catalog(store).list()} == {
        "step-000000001.json": "verified",
        "step-000000001-a002.json": "damaged",
    }


class Vanishing(MemoryStore):
    """Retention removes a manifest between listing and reading."""

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        if name == "step-000000001.json":
            self.objects.pop(name, None)
        return super().read(name, bytes_max)


def test_a_manifest_pruned_meanwhile_is_simply_gone() -> None:
    store = Vanishing()
    add_small(store, 1)
    add_small(store, 2)
    assert [item.step for item in Catalog(store).list()] == [2]


def test_get_by_step_takes_the_newest_attempt_even_if_bad() -> None:
    store = MemoryStore()
    add_small(store, 5)
    add(store, manifest_of(small_image(), step=5, attempt=2, file="step-000000005-a002.pt", state=State.BAD))
    assert Catalog(store).get(5).attempt == 2
    assert Catalog(store).get().attempt == 1


def test_get_warns_of_newer_ones_that_it_does_not_use(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    add_small(store, 1, state=State.BAD, note="older")
    add_small(store, 2)
    add_small(store, 3, state=State.BAD, note="a bit flipped")
    with caplog.at_level(logging.WARNING, logger="holdfast.catalog"):
        assert Catalog(store).get().step == 2
    assert [record.getMessage().endswith("a bit flipped") for record in caplog.records] == [True]


def test_a_step_that_is_not_there_names_those_near() -> None:
    store = MemoryStore()
    for step in (0, 10, 20, 30, 40, 1000, 2000):
        add_small(store, step)
    with pytest.raises(StoreMissing, match=r"(?m)no step 25; near it: 0, 10, 20, 30, 40$"):
        Catalog(store).get(25)


class CountingStore(MemoryStore):
    """Records the reads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        self.names.append(name)
        return super().read(name, bytes_max)


def test_manifests_of_other_steps_are_not_read() -> None:
    store = CountingStore()
    for step in range(50):
        add_small(store, step=step)
    catalog = Catalog(store)
    store.names.clear()
    assert catalog.get(7).step == 7
    assert store.names == ["step-000000007.json"]
    with pytest.raises(StoreMissing, match="near it: 45, 46, 47, 48, 49"):
        catalog.get(99)
    assert store.names == ["step-000000007.json"]


def test_a_step_whose_manifest_is_damaged() -> None:
    store = MemoryStore()
    store.objects["step-000000007.json"] = b"?"
    with pytest.raises(DamageError, match="step 7"):
        Catalog(store).get(7)


def test_when_none_can_be_used_every_reason_is_given() -> None:
    store = MemoryStore()
    add(store, manifest_of(small_image(), step=1, tensors=SMALL_TENSORS))
    add_small(store, 2, state=State.BAD, note="a bit flipped")
    with pytest.raises(DamageError, match=r"none of 2 checkpoints[\s\S]*a bit flipped[\s\S]*missing"):
        Catalog(store).get()
