"""Which kill comes when: drawn from a seed, over what the reference run was seen to do. Pure.

reference's checkpoints   ──3────────7────────11────────15──     a kill lies between two of them,
plan                            ▲5        ▲9                     no two in the same place: each one has a
                            one rank    the stager               checkpoint behind it that can be compared

Sequence: stepped, trains, answered, tick ─► Tell (a notice), Strike (SIGKILL)      one at a time
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from holdfast.errors import ConfigError


class KillTarget(StrEnum):
    """Who is killed."""

    RANK = "one rank"
    RANKS = "all ranks"
    STAGER = "stager and ranks"  # alone, a short script would be over before it is missed
    MPIRUN = "mpirun"


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill.

    Attributes:
        number: From 1.
        target: Who.
        notice: The rank is told first, and gets SIGKILL when it was answered, or its time is over.
        rank: Which, where it is one.
        after_step: It comes after this step, at the earliest.
        part: And so much of a step later, below 1.
    """

    number: int
    target: KillTarget
    notice: bool
    rank: int
    after_step: int
    part: float

    @property
    def what(self) -> str:
        """For people."""
        who = f"rank {self.rank}" if self.target is KillTarget.RANK else self.target.value
        return f"notice, then {who}" if self.notice else who


def plan(seed: int, kills: int, ways: str, *, ranks: int, checkpoints: Listed[int]) -> list[Kill]:
    """Draw the kills; the same from the same arguments.

    Args:
        seed: What they are drawn from.
        kills: How many.
        ways: `notice`, `none`, or `both`: in turn.
        ranks: Training ranks.
        checkpoints: Steps that the reference saved.

    Raises:
        ConfigError: The run has too few checkpoints.
    """
    random_ = random.Random(seed)  # noqa: S311 - drawn to be repeated
    gaps = list(itertools.pairwise(sorted(set(checkpoints))))
    if len(gaps) < kills:
        raise ConfigError(
            f"--kills {kills}: the run saves {len(gaps) + bool(checkpoints)} checkpoints, expected {kills + 1} or "
            "more: each kill needs one before it and one behind it. Let it train for more steps, save more "
            "often, or give fewer --kills"
        )
    chosen = sorted(random_.sample(range(len(gaps)), kills))
    turn = random_.randrange(2)
    bare: list[KillTarget] = []
    found = []
    for number, gap in enumerate(chosen, 1):
        notice = ways == "notice" or (ways == "both" and (number + turn) % 2 == 0)
        if not notice and not bare:
            bare = random_.sample(list(KillTarget), len(KillTarget))  # each kind once, before one comes again
        target = KillTarget.RANK if notice else bare.pop()
        first, following = gaps[gap]
        step = random_.randrange(first, max(first + 1, following - 1))
        found.append(Kill(number, target, notice, random_.randrange(ranks), step, random_.random()))
    return found


class GiveNotice(NamedTuple):
    """Send SIGTERM to the kill's rank: the notice."""

    kill: Kill


class Strike(NamedTuple):
    """SIGKILL, now."""

    kill: Kill


class Sequence:
    """Gives each kill when its time has come: an event in, an action or None out. The clock is handed in.

    Args:
        kills: In their order.
        notice_seconds: How long after a notice the rank is killed, if nothing answers it.
    """

    def __init__(self, kills: Listed[Kill], *, notice_seconds: float) -> None:
        self._left = list(kills)
        self._notice_seconds = notice_seconds
        self._trains = False  # every rank has taken its first step since the last kill
        self._step, self._stepped_at = -1, 0.0
        self._step_seconds = 0.0
        self._told_at: float | None = None
        self._answered = False

    @property
    def left(self) -> list[Kill]:
        """What has not come yet."""
        return list(self._left)

    def trains(self) -> None:
        """Every rank of an attempt has taken its first step."""
        self._trains = True

    def stepped(self, step: int, at: float) -> None:
        """A step is done."""
        if step == self._step + 1:
            self._step_seconds = max(0.0, at - self._stepped_at)
        self._step, self._stepped_at = step, at

    def answered(self) -> None:
        """What became of the notice is known."""
        self._answered = self._told_at is not None

    def tick(self, now: float) -> GiveNotice | Strike | None:
        """What is due."""
        if not self._left or not self._trains:
            return None
        kill = self._left[0]
        if self._told_at is not None:
            if not self._answered and now < self._told_at + self._notice_seconds:
                return None
            return self._struck(kill)
        if self._step < kill.after_step or now < self._stepped_at + kill.part * self._step_seconds:
            return None
        if kill.notice:
            self._told_at = now
            return GiveNotice(kill)
        return self._struck(kill)

    def _struck(self, kill: Kill) -> Strike:
        self._left.pop(0)
        self._trains = self._answered = False
        self._told_at = None
        return Strike(kill)
