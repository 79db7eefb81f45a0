"""The manifest: the commit record of one checkpoint, and the only thing that makes it exist.

`step-000000123.json` beside `step-000000123.pt`. Listing manifests lists the run; a file without a manifest is not a
checkpoint. A manifest is written last and whole. It is rewritten when the checkpoint has been read back (`state`
becomes `verified` or `bad`, `note` and `nonfinite` are added), and when the checkpoint turns out to be doubtful
(`doubt`); nothing else changes then.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import from_json

from holdfast.errors import DamageError
from holdfast.image.best_rule import BestRule, Metrics
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.save_record import StepRecord
from holdfast.image.split_record import SPLITS_MAX, SplitRecord
from holdfast.parse_cost import PLAIN_FACTOR, InputTooLarge, check_cost, json_cost
from holdfast.sealed import seal, unseal

_CRC_FIELD = "manifest_crc32"
_CONTENTS = b',"entries":['
NONFINITE_NAMED_MAX = 100  # tensors; a manifest of a fully broken state need not name every tensor twice
MANIFEST_BYTES_MAX = 1 << 28  # over a million tensors; a larger one is not read at all
_NAMES_TOLD = 4
_COMPLAINTS_SHOWN = 3  # pydantic lists every error, each with all of the input
_NAME = re.compile(r"step-(\d{9,19})(-a\d{3,10})?\.json")
READ_BACK = "read back and found whole"  # the note of a checkpoint that is whole, and drifted or doubtful
_Whole = Annotated[int, Field(ge=0, lt=2**62)]
_Crc = Annotated[int, Field(ge=0, lt=2**32)]
_Text = Annotated[str, Field(max_length=4096)]


class State(StrEnum):
    """State of a published checkpoint."""

    DURABLE = "durable"
    VERIFIED = "verified"
    BAD = "bad"


class _ManifestRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class EntryRecord(_ManifestRecord):
    """One zip entry: its place in the file and its true CRC-32."""

    name: _Text
    offset: _Whole
    nbytes: _Whole
    crc32: _Crc


class TensorRecord(_ManifestRecord):
    """One tensor: its path in the state, and the indices of its entry and of its split record."""

    path: _Text
    dtype: _Text
    shape: tuple[_Whole, ...]
    entry: _Whole
    split: _Whole | None = None


class NonfiniteRecord(_ManifestRecord):
    """Numbers in floating tensors that are not finite (NaN or infinite), counted when the file was read back."""

    values: _Whole  # how many there are; those in a storage that several tensors share count once
    tensors: _Whole
    # how many each of these tensors has, by path: the first `NONFINITE_NAMED_MAX` in the order of the state
    named: Annotated[dict[_Text, _Whole], Field(max_length=NONFINITE_NAMED_MAX)] = Field(default_factory=dict)

    def describe(self) -> str:
        """Describe for people how many there are, and in which tensors."""
        if not self.values:
            return "every number is finite"
        names = list(self.named)[:_NAMES_TOLD]
        more = f" and {self.tensors - len(names)} more" if self.tensors > len(names) else ""
        return f"{self.values} numbers are not finite (NaN or infinite), in {', '.join(names)}{more}"


class Manifest(_ManifestRecord):
    """All that is known of one checkpoint."""

    format: Literal["holdfast/1"] = "holdfast/1"
    run: _Text  # name of the run (last part of the URL)
    # fencing epoch of the writer; 1 for the first start of a run, more after each restart
    attempt: Annotated[int, Field(ge=1, lt=2**62)]
    step: _Whole
    file: _Text
    state: State = Field(default=State.DURABLE, strict=False)
    note: _Text = ""
    # why the replicas in the checkpoint differ; empty if no difference is known. If set, `state` is never `verified`:
    # it stays `durable` when the file was found whole, and `note` says so.
    drift: _Text = ""
    # why the checkpoint may be torn: a rank copied its state during training, and later saw a change that may have got
    # into the copy. Empty without doubt; if set, `state` is as with `drift`.
    doubt: _Text = ""
    image_bytes: Annotated[int, Field(gt=0, lt=2**62)]
    image_crc32: _Crc  # CRC-32 of the whole file
    chunk_bytes: Annotated[int, Field(gt=0, lt=2**40)]
    # CRC-32 of each window of `chunk_bytes` of the file, which restore checks as it reads
    chunk_crc32s: Annotated[tuple[_Crc, ...], FailFast()]
    ranks: Annotated[int, Field(gt=0, lt=2**31)]
    layout_digest: _Text
    write_id: _Text  # random, names this one write; also on the object itself if the store keeps metadata
    created: _Text
    # from the first `save()` of a rank to staged, and to durable
    pgt1_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    pgt2_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    # numbers that the script gave for this state, such as its validation loss
    metrics: Metrics = Field(default_factory=dict)
    # the rule by which the writer kept the best checkpoints of the run; None without one
    best: BestRule | None = None
    entries: Annotated[tuple[EntryRecord, ...], FailFast()]
    tensors: Annotated[tuple[TensorRecord, ...], FailFast()]
    nonfinite: NonfiniteRecord | None = None  # numbers that are not finite; None: they were not counted
    # how tensors were split among the ranks of the job; the file has them whole
    splits: Annotated[tuple[SplitRecord, ...], Field(max_length=SPLITS_MAX), FailFast()] = ()
    # times, bytes and waits of each phase on each rank (docs/format.md), for people and reports
    record: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        if "/" in self.file or "\\" in self.file or self.file.startswith(".") or "\0" in self.file:
            raise ValueError(f"file {self.file!r} leads out of the run")
        chunks = -(-self.image_bytes // self.chunk_bytes)
        if len(self.chunk_crc32s) != chunks:
            raise ValueError(f"{len(self.chunk_crc32s)} chunk CRCs for {chunks} chunks")
        for entry in self.entries:
            if entry.offset + entry.nbytes > self.image_bytes:
                raise ValueError(f"entry {entry.name} leaves the image")
        for tensor in self.tensors:
            if tensor.entry >= len(self.entries):
                raise ValueError(f"tensor {tensor.path} names entry {tensor.entry} of {len(self.entries)}")
            if tensor.split is not None and tensor.split >= len(self.splits):
                raise ValueError(f"tensor {tensor.path} names split {tensor.split} of {len(self.splits)}")
        return self

    @property
    def order(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)

    @property
    def is_drifted(self) -> bool:
        """Whether the checkpoint is not bad, but its ranks' replicas differed."""
        return bool(self.drift) and self.state is not State.BAD

    @property
    def is_doubtful(self) -> bool:
        """Whether the checkpoint is not bad, but its bytes may be of more than one instant."""
        return bool(self.doubt) and self.state is not State.BAD

    @property
    def caveat(self) -> str:
        """Why restore prefers other checkpoints, though this one may be whole; empty without a reason."""
        return "; ".join(filter(None, (self.doubt, self.drift)))

    @property
    def display_state(self) -> Literal["durable", "verified", "drifted", "doubtful", "bad"]:
        """The state for people: `doubtful` and `drifted` are durable with a caveat. Torn copies may also differ between
        ranks, so a checkpoint with both caveats is `doubtful`.
        """
        return "doubtful" if self.is_doubtful else "drifted" if self.is_drifted else self.state.value

    @property
    def is_copied_inside(self) -> bool:
        """Whether each rank has finished its copy inside `save()`; True unless a record says otherwise."""
        return StepRecord.from_json(self.record).is_copied_inside

    def with_doubt(self, doubt: str) -> Self:
        """Return the same checkpoint, now doubtful. The result of its read-back stays."""
        was_read = self.state is State.VERIFIED
        changes = {"doubt": doubt[:4096]} | ({"state": State.DURABLE, "note": READ_BACK} if was_read else {})
        return self.model_copy(update=changes)

    def to_bytes(self) -> bytes:
        """Return JSON, with the CRC-32 of all other bytes in its last line."""
        optional = {"nonfinite": self.nonfinite, "metrics": self.metrics or None, "best": self.best}
        excluded: dict[str, Any] = {name: True for name, value in optional.items() if value is None}
        if not self.splits:
            excluded |= {"splits": True, "tensors": {"__all__": {"split"}}}
        return seal(self.model_dump_json(indent=None, exclude=excluded).encode(), _CRC_FIELD)

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> Manifest:
        """Read a result of `to_bytes`. `source`: For messages. DamageError: truncated or altered."""
        body, cannot = _unseal(data, source), f"{source}: this version cannot read the manifest"
        try:
            check_cost(json_cost(body), len(data), PLAIN_FACTOR)
            # Before validation, because pydantic keeps a copy of all the input for each missing field.
            document = from_json(body)
            required = (name for name, field in cls.model_fields.items() if field.is_required())
            missing = [name for name in required if name not in document]
            del document
            if missing:
                raise DamageError(f"{cannot}: it has no {', '.join(missing)}")
            return cls.model_validate_json(body)
        except InputTooLarge as error:
            raise DamageError(f"{source}: not read: {error}; find out who wrote it") from error
        except (ValidationError, ValueError, TypeError, RecursionError) as error:
            raise DamageError(f"{cannot}: {_describe_error(error)}") from error

    @classmethod
    def head_from_bytes(cls, data: bytes, *, source: str) -> Manifest:
        """Read only the fields before `entries`, and check the CRC-32 of all. For callers that only identify a file: a
        manifest of tens of thousands of tensors takes half a second to read.
        """
        head, found, _ = _unseal(data, source).partition(_CONTENTS)
        if found:  # quotes in a text are escaped, so this is not inside a text
            try:
                return cls.model_validate_json(head + b',"entries":[],"tensors":[]}')
            except ValueError:
                pass  # `from_bytes` reports the error, or reads fields in another order
        return cls.from_bytes(data, source=source)


def _unseal(data: bytes, source: str) -> bytes:
    body = unseal(data, _CRC_FIELD)
    if body is None:
        raise DamageError(
            f"{source}: the manifest is truncated or altered (its CRC-32 is wrong); the step is not used"
        )
    return body


def _describe_error(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    found = error.errors(include_url=False, include_context=False, include_input=False)[:_COMPLAINTS_SHOWN]
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'all of it'}: {one['msg']}" for one in found)


def step_file_name(step: int, *, attempt: int = 0) -> str:
    """Return `step-000000123.pt`; with an attempt `step-000000123-a002.pt`, for a step whose plain name is taken."""
    suffix = f"-a{attempt:03d}" if attempt else ""
    return f"step-{step:09d}{suffix}.pt"


def manifest_name(file_name: str) -> str:
    return file_name.removesuffix(".pt") + ".json"


def is_manifest_name(name: str) -> bool:
    """Whether an object of this name (relative to the run) is a manifest."""
    return _NAME.fullmatch(name) is not None
