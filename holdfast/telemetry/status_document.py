"""The document that a stager or flusher sends to `holdfast status`: bounded in size, and checked by its reader.

Times are Unix seconds, named `*_at_unix`; None if this process does not know. A reader ignores unknown fields, so
either side may have a newer version.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import ProtocolError
from holdfast.image.shares import WRITERS_MAX

CHECKPOINTS_MAX = 64
LINES_MAX = 16
LOSSES_MAX = 256
RANKS_MAX = 64
TEXT_CHARACTERS_MAX = 300
_CAUSES_MAX = 32
_COMPLAINT_CHARACTERS_MAX = 1000

_Whole = Annotated[int, Field(ge=0, lt=2**62)]
_TIME_MAX = 1e11  # three thousand years
_Number = Annotated[float, Field(ge=0, le=_TIME_MAX, allow_inf_nan=False)]
_Seconds = _Number
_Text = Annotated[str, Field(max_length=4 * TEXT_CHARACTERS_MAX)]

# How the ranks reach the stager; `tls`: over TCP, encrypted.
Transport = Literal["mpi", "tcp", "tls"]
RankState = Literal["coming", "here", "silent", "left", "lost"]


class _StatusModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CheckpointStatus(_StatusModel):
    """State of one checkpoint, as known to this process."""

    attempt: _Whole
    step: _Whole
    image_bytes: _Whole | None = None
    saved_at_unix: _Number | None = None
    staged_at_unix: _Number | None = None
    durable_at_unix: _Number | None = None
    pgt1_seconds: _Seconds | None = None
    pgt2_seconds: _Seconds | None = None
    stall_seconds: _Seconds | None = None  # the longest stall of a rank's training thread
    read_back: Literal["", "verified", "drifted", "doubtful", "bad", "verify_failed"] = ""  # empty: not yet
    read_back_at_unix: _Number | None = None
    nonfinite: _Whole | None = None  # count of NaN and infinite numbers; None: not counted
    share: _Text = ""  # with several stagers: the share that this process writes, as K/S
    # the shares known to be written; the flusher of the first share knows of all
    sealed: Annotated[tuple[_Text, ...], Field(max_length=WRITERS_MAX)] = ()
    held: _Text = ""  # why the checkpoint waits for the store; empty if it does not
    failed: _Text = ""  # why the checkpoint failed; empty if it did not


class RankStatus(_StatusModel):
    """One training rank."""

    rank: _Whole
    host: _Text = ""
    pid: _Whole = 0
    state: RankState = "here"
    quiet_seconds: _Seconds | None = None
    step: _Whole | None = None  # the newest step that the rank has offered or declined
    stall_seconds: _Seconds | None = None  # of the training thread, by the rank's newest known checkpoint


class StatusLine(_StatusModel):
    """One event as a line for people."""

    at_unix: _Number
    event: _Text
    step: _Whole | None = None
    text: _Text = ""


_Lines = Annotated[tuple[StatusLine, ...], Field(max_length=LINES_MAX)]  # the newest ones, newest last


class FailuresStatus(_StatusModel):
    """Number of interrupted attempts, and the seconds of all attempts."""

    failures: _Whole
    seconds: _Seconds


class StatusDocument(_StatusModel):
    """The answer of one process to `holdfast status`."""

    version: Literal[1] = 1
    role: Literal["stager", "flusher"]
    run: _Text
    pid: _Whole
    attempt: _Whole = 0  # 0: none yet
    since_unix: _Number
    now_unix: _Number
    ranks_total: _Whole = 0  # `ranks` lists only the worst
    ranks: Annotated[tuple[RankStatus, ...], Field(max_length=RANKS_MAX)] = ()
    checkpoints: Annotated[tuple[CheckpointStatus, ...], Field(max_length=CHECKPOINTS_MAX)] = ()
    # causes of declined and failed steps, counted
    not_taken: Annotated[dict[str, _Whole], Field(max_length=_CAUSES_MAX)] = Field(default_factory=dict)
    declined: _Lines = ()
    notices: _Lines = ()
    problems: _Lines = ()
    stager_attached: bool | None = None
    work_ended_at_unix: _Number | None = None  # only a flusher without a stager: when the last stager left
    transport: Transport | None = None  # stager only; None: no job yet, or an older version
    seen: FailuresStatus | None = None  # flusher only: of the run before the newest job; None: not known
    interval_why: _Text = ""  # from the stager, with `every="auto"`: the reason for the interval, for people
    # stager only: how the first step of this job compares with that of the run before (`resume_proof`)
    resume: Literal["", "verified resume", "differs", "not proven"] = ""
    resume_text: _Text = ""  # the same as a sentence; both empty if the job did not resume
    # stager only: steps and training losses, oldest first
    losses: Annotated[
        tuple[tuple[_Whole, Annotated[float, Field(allow_inf_nan=False)]], ...], Field(max_length=LOSSES_MAX)
    ] = ()
    waits_at: _Text = ""  # only a standing stager without a job: HOST:PORT at which it listens


def checkpoint_status(attempt: int, step: int, **known: Any) -> CheckpointStatus:
    """Build a `CheckpointStatus`, without those of the `known` values that are invalid."""
    try:
        return CheckpointStatus(attempt=attempt, step=step, **known)
    except ValidationError as error:
        wrong = {detail["loc"][0] for detail in error.errors(include_url=False, include_input=False)}
        return CheckpointStatus(
            attempt=attempt, step=step, **{name: value for name, value in known.items() if name not in wrong}
        )


def read_status(document: Any, source: str) -> StatusDocument:
    """Check a document from the socket. Raises `ProtocolError`: names `source` and the wrong field."""
    try:
        return StatusDocument.model_validate(document)
    except (ValidationError, RecursionError) as error:
        why = str(error)[:_COMPLAINT_CHARACTERS_MAX]
        raise ProtocolError(
            f"{source}: this version does not understand the status document: {why}"
        ) from error
