"""Branches of a run: where `holdfast rewind` went back to, and which checkpoints are on the line that continues.

    RUN/rewind-a004.json      attempt 4 is the claim under which it was made; sealed, created once, never changed

    attempt 1   100 ── 200 ── 300 ── 400       branch 1
                        │ rewind-a004: to step 200 (attempt 1)
    attempt 5           └── 250 ── 350         branch 2, the current one: 100, 200, 250 and 350 are on its line

Attempts above that of the record write the new branch. Older checkpoints are on the line only up to the fork, so a
writer that wakes up late adds to its own branch, whatever the clocks say. A rewind writes only the record: no
checkpoint is changed, moved or removed.
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

    to_step: int  # the step from which training continues
    from_step: int  # the newest step that had a checkpoint when the run was rewound
    # first and last training step, both included, of each range whose batches are skipped from here on, in the order of
    # skipping
    skipped: tuple[StepRange, ...]
    reason: str = ""  # the text of `--reason`

    def __str__(self) -> str:
        left_out = f", without the batches of steps {format_ranges(self.skipped)}" if self.skipped else ""
        return f"rewound from step {self.from_step} to step {self.to_step}{left_out}"

    def skips(self, step: int) -> bool:
        """Whether the batch of this training step is skipped."""
        return any(one.first <= step <= one.last for one in self.skipped)

    def refusal_message(self) -> str:
        """Return why a state in which nothing can skip batches is not restored."""
        return (
            f"the run was {self}, and no object of the state can leave batches out; put the ResumableSampler or "
            "ResumableStream that gives the batches into the state, or give your own loader skip_batches(after, steps) "
            "(docs/data.md); or rewind again without --skip-batches"
        )


def format_ranges(ranges: Iterable[StepRange]) -> str:
    """Format ranges for people."""
    return ", ".join(map(str, sorted(ranges)))


class Rewind(BaseModel):
    """The record that `holdfast rewind` writes: the start of a branch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["holdfast-rewind/1"] = "holdfast-rewind/1"
    # the claim under which it was made. Higher attempts write the branch.
    attempt: Annotated[int, Field(ge=1, lt=2**62)]
    write_id: Annotated[str, Field(max_length=1024)]
    to: _Id  # attempt and step of the checkpoint from which the branch starts
    newest: _Id  # the newest checkpoint of the line that was left
    # first and last training step of each range whose batches are skipped, in ascending order. The numbers are those of
    # a training that continues from `to` without skipping.
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
    def abandoned(self) -> CheckpointId:
        return CheckpointId(*self.newest)

    @property
    def skipped(self) -> tuple[StepRange, ...]:
        return tuple(StepRange(*pair) for pair in self.skips)

    def to_bytes(self) -> bytes:
        return seal(self.model_dump_json().encode(), _CRC_FIELD)

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> Self:
        """Read the output of `to_bytes`. Raises `DamageError` if it is damaged, or of an unknown format."""
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


def rewind_attempt(name: str) -> int | None:
    """Return the attempt in the name of a rewind's record; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


class Branches:
    """The branches of a run. `rewinds`: all rewinds of the run, in any order."""

    def __init__(self, rewinds: Iterable[Rewind] = ()) -> None:
        self.rewinds = tuple(sorted(rewinds, key=lambda one: one.attempt))
        self._line = self._effective_rewinds()

    @classmethod
    def read(cls, store: Store, objects: Sequence[ObjectInfo]) -> Self:
        """Read the branches in a listing of the run. Raises `DamageError`: a record cannot be read, or was renamed."""
        found = []
        for info in objects:
            attempt = rewind_attempt(info.name)
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

    def _effective_rewinds(self) -> tuple[Rewind, ...]:
        """Return the rewinds that the current line has gone through, newest first."""
        found: list[Rewind] = []
        for one in reversed(self.rewinds):
            if not found or one.attempt < found[-1].fork.attempt:
                found.append(one)
        return tuple(found)

    def is_current(self, order: CheckpointId) -> bool:
        """Whether a checkpoint is on the line on which training continues."""
        for one in self._line:
            if order.attempt > one.attempt:
                return True
            if order > one.fork:
                return False
        return True

    def number(self, attempt: int) -> int:
        """Return the number of the branch that an attempt wrote, from 1."""
        return 1 + sum(one.attempt < attempt for one in self.rewinds)

    def sentence(self) -> str:
        """Return how the current branch began; empty for a run that was never rewound."""
        if not self.rewinds:
            return ""
        made = self.rewinds[-1]
        left_out = f", without the batches of steps {format_ranges(made.skipped)}" if made.skips else ""
        reason = f" ({made.reason})" if made.reason else ""
        number = 1 + len(self.rewinds)
        return (
            f"branch {number}: rewound from {made.abandoned} to {made.fork}{left_out}, {made.made_at}{reason}"
        )

    def rewind_since(self, order: CheckpointId) -> Rewound | None:
        """Return the rewind since a checkpoint of the current line was written; None if there was none since.

        Several rewinds may follow a checkpoint older than the fork. Their ranges are in the order of skipping:
        `skipped[1]` counts the steps of a training that skips `skipped[0]`. The ranges of one rewind are ordered from
        last to first, because a later range does not move the earlier ones.
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
        return Rewound(order.step, newest.abandoned.step, tuple(ranges), newest.reason)
