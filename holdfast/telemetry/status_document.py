"""The document that a stager or flusher sends to `holdfast status`: bounded in size, and checked by its reader.

Times are Unix seconds, named `*_at_unix`; None where this process does not know. A reader ignores fields that
it does not know, so either side may be of a newer version.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import ProtocolError
from holdfast.image.shares import WRITERS_MAX

CHECKPOINTS_MAX = 64
LINES_MAX = 16
RANKS_MAX = 64
TEXT_CHARACTERS_MAX = 300
_CAUSES_MAX = 32
_COMPLAINT_CHARACTERS_MAX = 1000

_Whole = Annotated[int, Field(ge=0, lt=2**62)]
_TIME_MAX = 1e11  # three thousand years: beyond it is no time of anything
_Number = Annotated[float, Field(ge=0, le=_TIME_MAX, allow_inf_nan=False)]
_Seconds = _Number
_Text = Annotated[str, Field(max_length=4 * TEXT_CHARACTERS_MAX)]

# How the ranks reach the stager; `tls`: over TCP, encrypted.
Transport = Literal["mpi", "tcp", "tls"]
RankState = Literal["coming", "here", "silent", "left", "lost"]


class _Words(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CheckpointStatus(_Words):
    """One checkpoint, as far as this process knows."""

    attempt: _Whole
    step: _Whole
    image_bytes: _Whole | None = None
    saved_at_unix: _Number | None = None
    staged_at_unix: _Number | None = None
    durable_at_unix: _Number | None = None
    pgt1_seconds: _Seconds | None = None
    pgt2_seconds: _Seconds | None = None
    stall_seconds: _Seconds | None = None  # the longest that a rank's training thread was held up by it
    # `verified`, `drifted`, `doubtful`, `bad`, or `verify_failed`, once it was read back
    read_back: Literal["", "verified", "drifted", "doubtful", "bad", "verify_failed"] = ""
    read_back_at_unix: _Number | None = None
    # how many of its numbers are not finite (NaN or infinite); None: not counted
    nonfinite: _Whole | None = None
    share: _Text = ""  # with several stagers: the share of it that this process writes, as K/S
    # the shares that are written, as far as this process knows; the flusher of the first share knows of all
    sealed: Annotated[tuple[_Text, ...], Field(max_length=WRITERS_MAX)] = ()
    held: _Text = ""  # why it waits for the store; empty if it does not
    failed: _Text = ""  # why it came to nothing; empty if it did not


class RankStatus(_Words):
    """One training rank."""

    rank: _Whole
    host: _Text = ""
    pid: _Whole = 0
    state: RankState = "here"
    quiet_seconds: _Seconds | None = None
    step: _Whole | None = None  # the newest step that it has offered or declined
    stall_seconds: _Seconds | None = None  # stall of its training thread by its newest known checkpoint


class StatusLine(_Words):
    """Something that happened, for people."""

    at_unix: _Number
    event: _Text
    step: _Whole | None = None
    text: _Text = ""


class FailuresStatus(_Words):
    """Attempts that were interrupted, and the seconds of all attempts."""

    failures: _Whole
    seconds: _Seconds


class StatusDocument(_Words):
    """All that one process says."""

    version: Literal[1] = 1
    role: Literal["stager", "flusher"]
    run: _Text
    pid: _Whole
    attempt: _Whole = 0  # 0: none yet
    since_unix: _Number
    now_unix: _Number
    ranks_total: _Whole = 0  # how many there are; `ranks` has the worst of them
    ranks: Annotated[tuple[RankStatus, ...], Field(max_length=RANKS_MAX)] = ()
    checkpoints: Annotated[tuple[CheckpointStatus, ...], Field(max_length=CHECKPOINTS_MAX)] = ()
    # causes of declined and failed steps, counted
    not_taken: Annotated[dict[str, _Whole], Field(max_length=_CAUSES_MAX)] = Field(default_factory=dict)
    declined: Annotated[
        tuple[StatusLine, ...], Field(max_length=LINES_MAX)
    ] = ()  # the last of them, newest last
    notices: Annotated[tuple[StatusLine, ...], Field(max_length=LINES_MAX)] = ()
    problems: Annotated[tuple[StatusLine, ...], Field(max_length=LINES_MAX)] = ()
    stager_attached: bool | None = None
    work_ended_at_unix: _Number | None = None  # flusher without a stager only: when the last one left
    transport: Transport | None = None  # stager only; None: it has no job, or is of an older version
    seen: FailuresStatus | None = None  # flusher only: of the run before the newest job; None: not known
    # stager that has brought the ranks to an interval (`every="auto"`): the reason, for people
    interval_why: _Text = ""
    # stager only: how the first step of this job compares with that of the run before (`resume_proof`)
    resume: Literal["", "verified resume", "differs", "not proven"] = ""
    resume_text: _Text = ""  # the same as a sentence; both empty where nothing was resumed
    waits_at: _Text = ""  # standing stager without a job only: HOST:PORT, where it waits for one


def checkpoint_status(attempt: int, step: int, **known: Any) -> CheckpointStatus:
    """One checkpoint; of what is known of it from outside, what can be true."""
    try:
        return CheckpointStatus(attempt=attempt, step=step, **known)
    except ValidationError as error:
        wrong = {detail["loc"][0] for detail in error.errors(include_url=False, include_input=False)}
        return CheckpointStatus(
            attempt=attempt, step=step, **{name: value for name, value in known.items() if name not in wrong}
        )


def read_status(document: Any, source: str) -> StatusDocument:
    """Check what came over the socket. Raises `ProtocolError`: naming `source` and the field."""
    try:
        return StatusDocument.model_validate(document)
    except (ValidationError, RecursionError) as error:
        why = str(error)[:_COMPLAINT_CHARACTERS_MAX]
        raise ProtocolError(
            f"{source}: this version does not understand the status document: {why}"
        ) from error
