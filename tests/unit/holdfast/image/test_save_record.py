"""The record of a save: its stored and sent bytes never change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.image.save_record import SaveRecord, StepRecord

# As a manifest of an earlier version has it, whitespace left out.
STORED = (
    b'{"ranks":{"0":{"saved_at_unix":1764200000.25,"wait_seconds":0.0,"slice_bytes":4096,"save_seconds":0.01,'
    b'"host":"node-a","copied_inside":true,"in_flight":1,"copy_seconds":0.5,"gate_seconds":0.0,"cst_seconds":0.01,'
    b'"replicas_digest":"0123456789abcdef","fingerprint_seconds":0.002,"sending_seconds":0.1,"crc_seconds":0.003,'
    b'"sent_bytes":4096,"of_a_newer_writer":[1,{"a":null}]},"1":{"saved_at_unix":1764200000.5,"host":"node-b"}},'
    b'"stager":{"staged_at_unix":1764200001.0,"pgt1_seconds":0.75,"offers_seconds":0.25,"receive_seconds":0.5},'
    b'"divergence":{"message":"step 7: replicas have drifted apart"}}'
)


def test_stored_record_is_written_back_byte_for_byte() -> None:
    record = StepRecord.from_json(json.loads(STORED))
    assert json.dumps(record.to_json(), separators=(",", ":")).encode() == STORED


def test_stored_record_is_read_into_fields() -> None:
    record = StepRecord.from_json(json.loads(STORED))
    assert record.saved_at_unix == 1764200000.25
    assert record.stall_seconds == {0: 0.01}
    assert record.is_copied_inside
    assert (record.pgt1_seconds, record.drift) == (0.75, "step 7: replicas have drifted apart")
    assert record.ranks[1].host == "node-b"


def test_step_record_has_the_trackers_that_rank_0_names() -> None:
    said = {"ranks": {"1": {"trackers": {"wandb": "x"}}, "0": {"trackers": {"wandb": "run-7"}}}}
    record = StepRecord.from_json(said)
    assert record.trackers == {"wandb": "run-7"}
    assert record.to_json()["ranks"]["0"] == {"trackers": {"wandb": "run-7"}}
    assert StepRecord.from_json({"ranks": {"0": {}}}).trackers == StepRecord().trackers == {}


def test_update_takes_over_known_fields_only() -> None:
    record = SaveRecord(saved_at_unix=1.0, save_seconds=0.0)
    record.update(SaveRecord(save_seconds=0.5, crc_seconds=0.25, more={"new": 1}))
    assert record.to_json() == {"saved_at_unix": 1.0, "save_seconds": 0.5, "crc_seconds": 0.25, "new": 1}


@pytest.mark.parametrize(
    "said",
    [
        {"saved_at_unix": "1"},
        {"saved_at_unix": True},
        {"saved_at_unix": float("inf")},
        {"saved_at_unix": 10**400},
        {"slice_bytes": 1.5},
        {"copied_inside": 1},
        {"host": 5},
        {"trackers": ["wandb"]},
        {"trackers": {"wandb": 7}},
        {"trackers": {"wandb": "x" * 1025}},
        {"trackers": {str(number): "run" for number in range(9)}},
        {"more": {"a": 1}},
        {"metrics": [1.0]},
        {"metrics": {"loss": float("nan")}},
        {"metrics": {"loss": "0.5"}},
        {"metrics": {"a\nb": 1.0}},
        {"metrics": {str(name): 1.0 for name in range(33)}},
    ],
)
def test_field_of_a_wrong_type_counts_as_unknown_and_is_kept(said: dict[str, Any]) -> None:
    record = SaveRecord.from_json(said)
    assert record == SaveRecord(more=said)
    assert record.to_json() == said


@pytest.mark.parametrize("said", [None, 5, [], {"ranks": 5}, {"ranks": {"x": {}, "0": 1}}, {"stager": []}])
def test_step_record_is_read_from_any_json(said: Any) -> None:
    assert StepRecord.from_json(said) == StepRecord()


def test_stalls_out_of_range_and_ranks_with_long_names_are_left_out() -> None:
    ranks = {"0": {"cst_seconds": -1.0}, "1": {"cst_seconds": 1e10}, "9" * 5000: {"cst_seconds": 1.0}}
    assert StepRecord.from_json({"ranks": ranks}).stall_seconds == {}


def test_metrics_of_a_step_are_those_of_rank_0() -> None:
    said = {"ranks": {"0": {"metrics": {"loss": 0.5}}, "1": {"metrics": {"loss": 0.25}}}}
    assert StepRecord.from_json(said).metrics == {"loss": 0.5}
    assert StepRecord.from_json({"ranks": {"1": {"metrics": {"loss": 0.25}}}}).metrics == {}
