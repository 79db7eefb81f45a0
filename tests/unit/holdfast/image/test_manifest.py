"""The manifest is read back unchanged, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.crc import crc32
from holdfast.errors import DamageError
from holdfast.image.best_rule import BestRule
from holdfast.image.manifest import Manifest, State, is_manifest_name, manifest_name, step_file_name
from holdfast.image.split_record import RUNS_MAX, SPLITS_MAX
from tests.support.checkpoints import SMALL_TENSORS, manifest_of, small_image

MANIFEST = manifest_of(
    small_image(), step=7, tensors=SMALL_TENSORS, note='a "note"\nwith [brackets] and ünicode'
)
DATA = MANIFEST.to_bytes()


def signed(document: dict[str, Any]) -> bytes:
    """A document with a CRC that holds, as an attacker could write it."""
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    return body + b',\n"manifest_crc32":%d}\n' % crc32(body)


def changed(**changes: Any) -> bytes:
    document = json.loads(DATA)
    del document["manifest_crc32"]
    return signed(document | changes)


def test_a_manifest_comes_back_as_it_was() -> None:
    assert Manifest.from_bytes(DATA, source="here") == MANIFEST


def test_a_manifest_is_plain_json() -> None:
    document = json.loads(DATA)
    assert document["step"] == 7
    assert document["state"] == "verified"
    assert document["tensors"][0]["path"] == "model/weight"


def test_a_manifests_head_says_whose_it_is_and_nothing_of_the_tensors() -> None:
    head = Manifest.head_from_bytes(DATA, source="here")
    assert head == MANIFEST.model_copy(update={"entries": (), "tensors": (), "record": head.record})
    assert head.write_id == MANIFEST.write_id


def test_a_manifest_with_its_fields_in_another_order_is_read_as_a_whole() -> None:
    document = json.loads(DATA)
    del document["manifest_crc32"]
    for order in (sorted(document), sorted(document, reverse=True)):
        data = signed({name: document[name] for name in order})
        assert Manifest.head_from_bytes(data, source="here") == MANIFEST


def test_a_text_that_looks_like_its_entries_is_a_text() -> None:
    tricky = MANIFEST.model_copy(update={"note": ',"entries":[],"tensors":[]}'})
    assert Manifest.head_from_bytes(tricky.to_bytes(), source="here").note == tricky.note


def test_the_head_of_a_damaged_manifest_is_refused() -> None:
    spoilt = bytearray(DATA)
    spoilt[-40] ^= 1
    with pytest.raises(DamageError, match="here: the manifest is truncated or altered"):
        Manifest.head_from_bytes(bytes(spoilt), source="here")
    with pytest.raises(DamageError, match="here: this version cannot read the manifest"):
        Manifest.head_from_bytes(changed(step=-1), source="here")


def is_refused(data: bytes) -> bool:
    try:
        Manifest.from_bytes(data, source="there")
    except DamageError as error:
        return str(error).startswith("there: ")
    return False


def test_any_flipped_bit_is_damage() -> None:
    spoilt = bytearray(DATA)
    for at in range(len(DATA)):
        for bit in range(8):
            spoilt[at] ^= 1 << bit
            assert is_refused(bytes(spoilt)), (at, bit)
            spoilt[at] ^= 1 << bit


def test_any_truncation_is_damage() -> None:
    for length in range(len(DATA)):
        assert is_refused(DATA[:length]), length


@given(st.data())
def test_any_replaced_run_is_damage(data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(DATA)))
    end = data.draw(st.integers(begin, len(DATA)))
    spoilt = DATA[:begin] + data.draw(st.binary(max_size=20)) + DATA[end:]
    assert spoilt == DATA or is_refused(spoilt)


@given(st.binary(max_size=200))
def test_noise_is_damage(noise: bytes) -> None:
    with pytest.raises(DamageError):
        Manifest.from_bytes(noise, source="there")


@pytest.mark.parametrize("name", ["../evil.pt", "/etc/passwd", ".hidden", "a\\b.pt", "a\0b", "sub/step.pt"])
def test_a_file_that_leads_out_of_the_run_is_refused(name: str) -> None:
    with pytest.raises(DamageError, match="leads out"):
        Manifest.from_bytes(changed(file=name), source="there")


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": 2**63},
        {"step": "7"},
        {"step": 7.0},
        {"attempt": 0},
        {"image_bytes": 0},
        {"image_bytes": 2**62},
        {"chunk_bytes": 2**40},
        {"chunk_crc32s": []},
        {"chunk_crc32s": [2**32] * 5},
        {"format": "holdfast/2"},
        {"state": "excellent"},
        {"tensors": [{"path": "p", "dtype": "float32", "shape": [1], "entry": 10_000}]},
        {"entries": [{"name": "n", "offset": 2**40, "nbytes": 1, "crc32": 0}], "tensors": []},
        {"pgt1_seconds": -1.0},
    ],
)
def test_a_contradictory_manifest_is_refused_even_with_a_right_crc(changes: dict[str, Any]) -> None:
    with pytest.raises(DamageError, match="cannot read the manifest"):
        Manifest.from_bytes(changed(**changes), source="there")


def test_deep_nesting_is_damage_and_not_a_crash() -> None:
    body = b'{"record":' + b"[" * 100_000
    with pytest.raises(DamageError):
        Manifest.from_bytes(body + b',\n"manifest_crc32":%d}\n' % crc32(body), source="there")


def test_fields_of_later_versions_are_passed_over() -> None:
    assert Manifest.from_bytes(changed(later="more"), source="here") == MANIFEST


def test_a_manifest_without_splits_says_nothing_of_them() -> None:
    assert b"split" not in DATA


SPLIT = [{"parts": 4, "cuts": [[1024, 4]], "copies": 1, "copies_max": 1, "ranks": [0, 1, 4]}]


def test_a_manifest_says_how_tensors_were_split() -> None:
    tensors = [tensor.model_dump() | {"split": 0 if n else None} for n, tensor in enumerate(MANIFEST.tensors)]
    made = Manifest.from_bytes(changed(splits=SPLIT, tensors=tensors), source="here")
    assert [tensor.split for tensor in made.tensors] == [None, 0, 0, 0]
    assert made.splits[0].describe() == "split in 4 along dim 0"
    assert Manifest.from_bytes(made.to_bytes(), source="here") == made


@pytest.mark.parametrize(
    "splits",
    [
        [],
        [{"parts": 1}],
        [SPLIT[0] | {"parts": 0}],
        [SPLIT[0] | {"cuts": [[1, 1]] * 65}],
        [SPLIT[0] | {"cuts": [[1] * (2 * RUNS_MAX + 1)]}],
        [SPLIT[0] | {"ranks": [0] * (3 * RUNS_MAX + 1)}],
        [SPLIT[0] | {"ranks": [2**62]}],
        SPLIT * (SPLITS_MAX + 1),
    ],
)
def test_splits_that_are_none_or_too_many_are_refused(splits: list[Any]) -> None:
    tensors = [tensor.model_dump() | {"split": 0} for tensor in MANIFEST.tensors]
    with pytest.raises(DamageError, match="cannot read the manifest"):
        Manifest.from_bytes(changed(splits=splits, tensors=tensors), source="there")


def test_metrics_stand_before_the_entries_and_only_where_there_are_some() -> None:
    """An older version wrote the same bytes for a checkpoint without metrics, and passes over the fields of others."""
    assert not {"metrics", "best"} & json.loads(DATA).keys()
    rule = BestRule(metric="val/loss", mode="min")
    rated = MANIFEST.model_copy(update={"metrics": {"val/loss": 0.1, "acc": 1.0}, "best": rule})
    assert Manifest.from_bytes(rated.to_bytes(), source="here") == rated
    head = Manifest.head_from_bytes(rated.to_bytes(), source="here")
    assert (head.metrics, head.best, head.entries) == (rated.metrics, rule, ())


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": {"loss": None}},
        {"metrics": {"loss": "0.5"}},
        {"metrics": {"loss": 1e400}},
        {"metrics": {"": 1.0}},
        {"metrics": {str(name): 1.0 for name in range(33)}},
        {"best": {"metric": "loss", "mode": "least"}},
        {"best": {"metric": "loss"}},
    ],
)
def test_metrics_that_are_none_are_damage(changes: dict[str, Any]) -> None:
    with pytest.raises(DamageError, match=r"cannot read the manifest: (metrics|best)"):
        Manifest.from_bytes(changed(**changes), source="here")


def test_a_state_is_changed_in_a_copy() -> None:
    bad = MANIFEST.model_copy(update={"state": State.BAD, "note": "chunk 1"})
    assert Manifest.from_bytes(bad.to_bytes(), source="here").state is State.BAD
    assert MANIFEST.state is State.VERIFIED


def test_attempt_comes_before_step() -> None:
    image = small_image()
    repeated = manifest_of(image, step=5, attempt=2)
    assert repeated.order > manifest_of(image, step=900, attempt=1).order


def test_file_names_carry_step_and_attempt() -> None:
    assert step_file_name(123) == "step-000000123.pt"
    assert step_file_name(123, attempt=2) == "step-000000123-a002.pt"
    assert manifest_name("step-000000123-a002.pt") == "step-000000123-a002.json"


@given(st.integers(0, 2**62 - 1), st.integers(0, 2**31))
def test_every_name_made_is_recognised(step: int, attempt: int) -> None:
    assert is_manifest_name(manifest_name(step_file_name(step, attempt=attempt)))


@pytest.mark.parametrize(
    "name",
    [
        "step-1.json",
        "step-000000123.pt",
        "x/step-000000123.json",
        "step-000000123.json.tmp",
        "",
        "config.json",
    ],
)
def test_other_file_names_are_not_manifest_names(name: str) -> None:
    assert not is_manifest_name(name)
