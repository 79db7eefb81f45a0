"""Times, bytes and waits of one checkpoint, as ranks, stager and flusher state them (docs/format.md, "Record").

    SaveRecord of each rank, from save() to DONE ─┐
    times of the stager ──────────────────────────┴─► StepRecord: beside the ring ─► with the writer's times: manifest

Records are for people and reports. Readers treat them as input from outside: a field of a wrong type counts as unknown.
Unknown fields, such as those of a newer version, are kept as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from holdfast.image.best_rule import METRICS_MAX, is_metric_name

_RANK_DIGITS_MAX = 9
_STALL_SECONDS_MAX = 1e9
_TEXTS = ("host", "replicas_digest", "job", "drift")
_COUNTS = ("slice_bytes", "sent_bytes", "in_flight")
_FLAGS = ("copied_inside",)
TRACKERS_MAX, TRACKER_CHARACTERS_MAX = 8, 1024


@dataclass(slots=True)
class SaveRecord:
    """One rank's record of one save. None: not known yet. Seconds are durations unless a name says `at_unix`."""

    saved_at_unix: float | None = None
    wait_seconds: float | None = None
    slice_bytes: int | None = None
    save_seconds: float | None = None  # in `save()`
    host: str | None = None
    # whether the copy was finished inside `save()`, so that nothing could tear it
    copied_inside: bool | None = None
    in_flight: int | None = None
    copy_seconds: float | None = None
    gate_seconds: float | None = None  # waited at the gate
    cst_seconds: float | None = None  # in `save()` and at the gate: the stall
    replicas_digest: str | None = None
    fingerprint_seconds: float | None = None
    # from `save()` to this state of the transfer, as are the fields of the other states
    sending_seconds: float | None = None
    crc_seconds: float | None = None
    sent_bytes: int | None = None
    sent_seconds: float | None = None
    staged_seconds: float | None = None
    durable_seconds: float | None = None
    declined_seconds: float | None = None
    failed_seconds: float | None = None
    tier_seconds: float | None = None
    job: str | None = None  # in the seal of a slice: the job that wrote it
    drift: str | None = None  # for a slice in the ring: why its replicas differ
    # numbers that the script gave for this state, such as its validation loss; in rank 0's record alone
    metrics: dict[str, float] | None = None
    # from rank 0: this training's run in each experiment tracker, as `trainer_side/trackers` names both
    trackers: dict[str, str] | None = None
    # fields that this version does not know, or of an unexpected type
    more: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the known fields in order, then the others."""
        known = ((name, getattr(self, name)) for name in _NAMES)
        return {name: value for name, value in known if value is not None} | self.more

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read any JSON object; never fails."""
        record = cls()
        for name, value in document.items():
            if _has_expected_type(name, value):
                setattr(record, name, value)
            else:
                record.more[name] = value
        return record

    def update(self, other: SaveRecord) -> None:
        """Take over all fields that `other` has."""
        for name in _NAMES:
            if (value := getattr(other, name)) is not None:
                setattr(self, name, value)
        self.more |= other.more


_NAMES = tuple(one.name for one in fields(SaveRecord) if one.name != "more")


def _has_expected_type(name: str, value: Any) -> bool:
    if name in _TEXTS:
        return isinstance(value, str)
    if name in _FLAGS:
        return isinstance(value, bool)
    if name == "trackers":
        return is_trackers(value)
    if name in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "metrics":
        return _are_metrics(value)
    return name in _NAMES and is_number(value)


def is_trackers(value: Any) -> bool:
    """Whether a value from outside is a few short texts by name."""
    if not isinstance(value, Mapping) or len(value) > TRACKERS_MAX:
        return False
    texts = [*value, *value.values()]
    return all(isinstance(one, str) and len(one) <= TRACKER_CHARACTERS_MAX for one in texts)


def is_number(value: Any) -> bool:
    """Whether a value from outside is a finite number that a float holds."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and -sys.float_info.max <= value <= sys.float_info.max


def _are_metrics(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= METRICS_MAX
        and all(is_metric_name(name) and is_number(one) for name, one in value.items())
    )


@dataclass(slots=True)
class StepRecord:
    """The record of one checkpoint."""

    ranks: dict[int, SaveRecord] = field(default_factory=dict)  # rank → what it said
    staged_at_unix: float | None = None  # when every slice was in the ring, by the stager's clock
    pgt1_seconds: float | None = None  # since the first save
    offers_seconds: float | None = None  # from the first rank's offer to the last
    receive_seconds: float | None = None  # from then to staged
    drift: str = ""  # why the replicas differ, as the stager found; empty if no difference is known

    def to_json(self) -> dict[str, Any]:
        stager = ((name, getattr(self, name)) for name in _STAGER)
        return {
            "ranks": {str(rank): one.to_json() for rank, one in sorted(self.ranks.items())},
            "stager": {name: value for name, value in stager if value is not None},
            **({"divergence": {"message": self.drift}} if self.drift else {}),
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Read the record of a manifest, a ring's checkpoint file or an event; never fails."""
        document = document if isinstance(document, Mapping) else {}
        ranks, stager, divergence = (
            _mapping(document.get(name)) for name in ("ranks", "stager", "divergence")
        )
        drift = divergence.get("message")
        return cls(
            {
                int(rank): SaveRecord.from_json(one)
                for rank, one in ranks.items()
                if isinstance(one, Mapping) and len(str(rank)) <= _RANK_DIGITS_MAX and str(rank).isdecimal()
            },
            **{name: stager[name] for name in _STAGER if is_number(stager.get(name))},
            drift=drift if isinstance(drift, str) else "",
        )

    @property
    def saved_at_unix(self) -> float | None:
        """When the first rank called `save()`."""
        return min((at for one in self.ranks.values() if (at := one.saved_at_unix) is not None), default=None)

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers that the script gave for the state; empty without any."""
        first = self.ranks.get(0)
        return {} if first is None or first.metrics is None else first.metrics

    @property
    def stall_seconds(self) -> dict[int, float]:
        """How long the checkpoint stalled the training thread of each rank (CST)."""
        stalls = {rank: one.cst_seconds for rank, one in self.ranks.items()}
        return {
            rank: float(seconds)
            for rank, seconds in stalls.items()
            if seconds is not None and 0 <= seconds < _STALL_SECONDS_MAX
        }

    @property
    def trackers(self) -> dict[str, str]:
        """The runs of experiment trackers, from rank 0's record."""
        return (self.ranks[0].trackers if 0 in self.ranks else None) or {}

    @property
    def is_copied_inside(self) -> bool:
        """Whether each rank finished its copy inside `save()`; ranks that do not say so count as True."""
        return all(one.copied_inside is not False for one in self.ranks.values())


_STAGER = ("staged_at_unix", "pgt1_seconds", "offers_seconds", "receive_seconds")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
