"""Several stagers, one file: every stage of a checkpoint's life in two shares, and every set of victims.

    stage     how much of step 6 each stager has, and the point at which each flusher is stopped
    victims   processes that get SIGKILL there; a lost node loses its ring too
    cell      a stage, its victims, on a directory or on S3, and how many stagers the next job has
              frozen: the victims do not die, their machine freezes and wakes after the next job

Stagers are simulated (tests/chaos/share_machines.py); flushers and store are real.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "ALL_SHARE_CELLS",
    "IDLE",
    "SHARE_STAGES",
    "SHARE_VICTIMS",
    "Sent",
    "ShareCell",
    "ShareStage",
    "ShareVictims",
]


class Sent(IntEnum):
    """How much of its share a stager has received."""

    BEGUN = 0
    HALF = 1
    STAGED = 2


class ShareStage(NamedTuple):
    """One row. Each pair: of the first stager, which leads, and of the other one.

    Attributes:
        sent: How much of its share each stager has received.
        stands: Where each flusher is stopped, in the second checkpoint; empty: nowhere; `IDLE`: before that.
        sealed: Whether the share is sealed.
    """

    name: str
    sent: tuple[Sent, Sent]
    stands: tuple[str, str]
    sealed: tuple[bool, bool] = (False, False)

    @property
    def is_staged(self) -> bool:
        """Whether every share is staged."""
        return min(self.sent) is Sent.STAGED


class ShareVictims(NamedTuple):
    """One column: shares, from 0, whose stager or flusher is killed. `nodes`: both die and the ring is lost."""

    name: str
    stagers: tuple[int, ...] = ()
    flushers: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


IDLE = "idle"
_ALL_STAGED = (Sent.STAGED, Sent.STAGED)
SHARE_STAGES = (
    ShareStage("upload begun", (Sent.BEGUN, Sent.BEGUN), ("shares_begun", "")),
    ShareStage("a part written", (Sent.HALF, Sent.HALF), ("part_written", "part_written")),
    ShareStage("the first share staged", (Sent.STAGED, Sent.HALF), ("crcs_put", "part_written")),
    ShareStage("the second share staged", (Sent.HALF, Sent.STAGED), ("part_written", "part_written")),
    ShareStage("all staged, no upload", _ALL_STAGED, (IDLE, "")),
    ShareStage("all staged, parts left", _ALL_STAGED, ("part_written", "part_written")),
    ShareStage("CRCs put", _ALL_STAGED, ("crcs_put", "part_begun")),
    ShareStage("sealed by the first", _ALL_STAGED, ("share_sealed", "part_begun"), (True, False)),
    ShareStage("sealed by the second", _ALL_STAGED, ("crcs_put", "share_sealed"), (False, True)),
    ShareStage("all sealed", _ALL_STAGED, ("all_sealed", ""), (True, True)),
    ShareStage("file published, no manifest", _ALL_STAGED, ("file_published", ""), (True, True)),
    ShareStage("manifest written, records left", _ALL_STAGED, ("manifest_written", ""), (True, True)),
)

SHARE_VICTIMS = (
    ShareVictims("first stager", stagers=(0,)),
    ShareVictims("second stager", stagers=(1,)),
    ShareVictims("first flusher", flushers=(0,)),
    ShareVictims("second flusher", flushers=(1,)),
    ShareVictims("both flushers", flushers=(0, 1)),
    ShareVictims("first node", nodes=(0,)),
    ShareVictims("second node", nodes=(1,)),
    ShareVictims("both stagers", stagers=(0, 1)),
    ShareVictims("everything", stagers=(0, 1), flushers=(0, 1)),
    ShareVictims("everything, both rings", nodes=(0, 1)),
)


class ShareCell(NamedTuple):
    """One run.

    Attributes:
        then: Number of stagers of the next job.
        at_once: Whether the next job's flushers take over rings of another number of stagers at once.
        frozen: Whether the victims' machines freeze, and wake up when the next job is over.
    """

    stage: ShareStage
    victims: ShareVictims
    then: int = 2
    store: str = "directory"
    at_once: bool = False
    frozen: bool = False

    @property
    def name(self) -> str:
        """In test ids and results."""
        return f"{self.row} x {self.victims.name}"

    @property
    def row(self) -> str:
        """Its row in the table."""
        how = (("S3", self.store == "S3"), ("at once", self.at_once), ("frozen", self.frozen))
        return ", ".join((self.stage.name, f"then {self.then}", *(word for word, is_so in how if is_so)))

    @property
    def regular(self) -> bool:
        """Whether `make check` runs it."""
        return self.name in _REGULAR

    @property
    def unsealed(self) -> tuple[int, ...]:
        """The shares that are lost with their node, without a seal."""
        return tuple(share for share in self.victims.nodes if not self.stage.sealed[share])

    @property
    def survives(self) -> bool:
        """Whether the step is published; if not, it is listed nowhere."""
        died = self.victims.nodes if self.stage.is_staged else self.victims.nodes + self.victims.stagers
        if not self.stage.is_staged:
            return not died
        return not self.unsealed


_REGULAR = {
    "a part written, then 2 x second flusher",
    "sealed by the first, then 2 x second node",
    "file published, no manifest, then 2 x first node",
    "all sealed, then 1, at once x everything",
    "all sealed, then 2, S3 x first node",
    "all sealed, then 2, frozen x first node",
}
_LEFT_TO_ONE = {"first node", "both stagers", "everything", "everything, both rings"}
SHARE_CELLS = tuple(
    ShareCell(stage, victims, then)
    for stage in SHARE_STAGES
    for victims in SHARE_VICTIMS
    for then in ((1, 2) if victims.name in _LEFT_TO_ONE else (2,))
)
AT_ONCE_SHARE_CELLS = tuple(
    ShareCell(stage, victims, then=1, at_once=True)
    for stage in SHARE_STAGES
    for victims in SHARE_VICTIMS
    if 0 in victims.flushers
)
FROZEN_SHARE_CELLS = tuple(
    ShareCell(stage, victims, frozen=True)
    for stage in SHARE_STAGES
    for victims in SHARE_VICTIMS
    if victims.nodes
)
_ON_S3 = (
    ("all staged, parts left", "both flushers", False),
    ("all staged, parts left", "everything", False),
    ("CRCs put", "first flusher", False),
    ("sealed by the first", "second flusher", False),
    ("sealed by the first", "second node", False),
    ("sealed by the second", "first node", False),
    ("all sealed", "first flusher", False),
    ("all sealed", "first node", False),
    ("file published, no manifest", "first flusher", False),
    ("file published, no manifest", "first node", False),
    ("sealed by the first", "second node", True),
    ("all sealed", "first node", True),
)
_STAGES = {stage.name: stage for stage in SHARE_STAGES}
_VICTIMS = {victims.name: victims for victims in SHARE_VICTIMS}
S3_SHARE_CELLS = tuple(
    ShareCell(_STAGES[stage], _VICTIMS[victims], store="S3", frozen=frozen)
    for stage, victims, frozen in _ON_S3
)
ALL_SHARE_CELLS = (*SHARE_CELLS, *S3_SHARE_CELLS, *AT_ONCE_SHARE_CELLS, *FROZEN_SHARE_CELLS)
