"""Branches of a run: where `holdfast rewind` went back to, and which checkpoints belong to what goes on from there.

    RUN/rewind-a004.json      attempt 4 is the claim under which it was made; sealed, created once, never changed

    attempt 1   100 ── 200 ── 300 ── 400       branch 1
                        │ rewind-a004: to step 200 (attempt 1)
    attempt 5           └── 250 ── 350         branch 2, the current one: 100, 200, 250 and 350 are on its line

Attempts above that of the record write the new branch. Older checkpoints belong to the line only up to the one that was
gone back to; so a writer that wakes up late adds to its own branch, whatever the clocks say. Nothing but the record is
written: no checkpoint is changed, moved or removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import DamageError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.sealed import seal, unseal
from holdfast.store.base import ObjectInfo, Store

_CRC_FIELD = "rewind_crc32"
_NAME = re.compile(r"rewind-a(\d{3,18})\.json")
_BYTES_MAX = 1 << 16
REASON_CHARACTERS_MAX = 1000
SKIPS_MAX = 100

_Whole = Annotated[int, Field(ge=0, lt=2**62)]
_Id = tuple[Annotated[int, Field(ge=1, lt=2**62)], _Whole]


class StepRange(NamedTuple):
    """Training steps, both ends included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}..{self.last}"


class Rewound(NamedTuple):
    """How `holdfast rewind` has brought training back to a checkpoint."""

    to_step: int  # the step from which training goes on
    from_step: int  # the newest step that had a checkpoint when the run was rewound
    # first and last training step of each range whose batches are left out from here on, both included, in the order in
    # which they are left out
    skipped: tuple[StepRange, ...]
    reason: str = ""  # the text of `--reason`

    def __str__(self) -> str:
        left_out = f", without the batches of steps {told(self.skipped)}" if self.skipped else ""
        return f"rewound from step {self.from_step} to step {self.to_step}{left_out}"

    def leaves_out(self, step: int) -> bool:
        """Whether the batch of this training step is left out."""
        return any(one.first <= step <= one.last for one in self.skipped)

    def refusal(self) -> str:
        """Why a state in which nothing can leave out batches is not restored."""
        return (
            f"the run was {self}, and no object of the state can leave batches out; put the ResumableSampler or "
            "ResumableStream that gives the batches into the state, or give your own loader skip_batches(after, steps) "
            "(docs/data.md); or rewind again without --skip-batches"
        )


def told(ranges: Iterable[StepRange]) -> str:
    """Ranges for people."""
    return ", ".join(map(str, sorted(ranges)))


class Rewind(BaseModel):
    """The record that `holdfast rewind` writes: the begin of a branch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["holdfast-rewind/1"] = "holdfast-rewind/1"
    # the claim under which it was made. Higher attempts write the branch.
    attempt: Annotated[int, Field(ge=1, lt=2**62)]
    write_id: Annotated[str, Field(max_length=1024)]
    to: _Id  # attempt and step of the checkpoint from which the branch goes on
    newest: _Id  # the newest checkpoint of the line that was left
    # first and last training step of each range whose batches are left out, in ascending order. The numbers are those
    # of the training that goes on from `to` without leaving anything out.
    skips: Annotated[tuple[tuple[_Whole, _Whole], ...], Field(max_length=SKIPS_MAX)] = ()
    made_at: Annotated[str, Field(max_length=64)] = ""  # for people
    reason: Annotated[str, Field(max_length=REASON_CHARACTERS_MAX)] = ""

    @property
    def name(self) -> str:
        return f"rewind-a{self.attempt:03d}.json"

    @property
    def fork(self) -> CheckpointId:
        return CheckpointId(*self.to)

    @property
    def left(self) -> CheckpointId:
        return CheckpointId(*self.newest)

    @property
    def skipped(self) -> tuple[StepRange, ...]:
        return tuple(StepRange(*pair) for pair in self.skips)

    def to_bytes(self) -> bytes:
        return seal(self.model_dump_json().encode(), _CRC_FIELD)

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> Self:
        """Read what `to_bytes` wrote. Raises `DamageError`: it is damaged, or of a format that is not known."""
        body = unseal(data, _CRC_FIELD)
        problem = "its CRC-32 does not hold"
        if body is not None:
            try:
                return cls.model_validate_json(body)
            except ValidationError as error:
                found = error.errors(include_url=False, include_input=False)[0]
                problem = f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
        raise DamageError(
            f"{source}: the record of a rewind cannot be read ({problem}), so it is not known from which checkpoints "
            "training goes on. Bring the file back from a copy; or remove it, which takes the rewind back"
        )


def rewound_attempt(name: str) -> int | None:
    """The attempt in the name of a rewind's record; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


class Branches:
    """The branches of a run. `rewinds`: all of the run, in any order; kept oldest first."""

    def __init__(self, rewinds: Iterable[Rewind] = ()) -> None:
        self.rewinds = tuple(sorted(rewinds, key=lambda one: one.attempt))
        self._line = self._in_effect()

    @classmethod
    def read(cls, store: Store, objects: Sequence[ObjectInfo]) -> Self:
        """The branches by a listing of the run. Raises `DamageError`: a record cannot be read, or was renamed."""
        found = []
        for info in objects:
            attempt = rewound_attempt(info.name)
            if attempt is None:
                continue
            source = f"{store.url}/{info.name}"
            rewind = Rewind.from_bytes(store.read(info.name, _BYTES_MAX), source=source)
            if rewind.attempt != attempt:
                raise DamageError(
                    f"{source}: is the record of attempt {rewind.attempt}: it was renamed or copied; name it "
                    f"{rewind.name}, or remove it"
                )
            found.append(rewind)
        return cls(found)

    def _in_effect(self) -> tuple[Rewind, ...]:
        """The rewinds that the current line has gone through, newest first."""
        found: list[Rewind] = []
        for one in reversed(self.rewinds):
            if not found or one.attempt < found[-1].fork.attempt:
                found.append(one)
        return tuple(found)

    def is_current(self, order: CheckpointId) -> bool:
        """Whether a checkpoint is on the line that training goes on from."""
        for one in self._line:
            if order.attempt > one.attempt:
                return True
            if order > one.fork:
                return False
        return True

    def number(self, attempt: int) -> int:
        """The number of the branch that an attempt has written, from 1."""
        return 1 + sum(one.attempt < attempt for one in self.rewinds)

    def sentence(self) -> str:
        """How the current branch began; empty for a run that was never rewound."""
        if not self.rewinds:
            return ""
        made = self.rewinds[-1]
        left_out = f", without the batches of steps {told(made.skipped)}" if made.skips else ""
        reason = f" ({made.reason})" if made.reason else ""
        number = 1 + len(self.rewinds)
        return f"branch {number}: rewound from {made.left} to {made.fork}{left_out}, {made.made_at}{reason}"

    def rewound(self, order: CheckpointId) -> Rewound | None:
        """The rewind that a checkpoint of the current line does not know of; None if it was written after the rewind.

        A checkpoint older than the fork may lie before several rewinds. Their ranges come in the order in which they
        are left out: `skipped[1]` counts the steps of a training that leaves out `skipped[0]`. The ranges of one rewind
        come from the last to the first, because none of them moves the ones before it.
        """
        unknown = [one for one in reversed(self._line) if order.attempt <= one.attempt]
        if not unknown:
            return None
        ranges = (
            StepRange(max(one.first, order.step + 1), one.last)
            for rewind in unknown
            for one in reversed(rewind.skipped)
            if one.last > order.step
        )
        newest = unknown[-1]
        return Rewound(order.step, newest.left.step, tuple(ranges), newest.reason)
