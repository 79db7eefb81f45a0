"""Who is spared: the ranks on machines that will be taken away send only what nobody else has.

    NOTICE of rank 3 ─► the ranks on its machine go ─┐
    AT of every rank ─► what it can carry ───────────┴─► Sparing, in SAVE_AT ─► the same layout on every rank

Decided by the stager, at the step that is appointed because of a TERMINATE notice; it holds for the rest of the job
(docs/design/011-one-step-for-all-ranks.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ProtocolError
from holdfast.image.layout import Layout
from holdfast.image.slices import areas_of

NO_LIMIT = 2**62 - 1
_SECONDS_MAX = 1e6
_RANKS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Sparing:
    """The ranks that are spared from a step on. All ranks make the same layout of it.

    Attributes:
        ranks: The spared ranks, ascending; empty: none.
        area_bytes_max: The largest staging area that every rank can have.
    """

    ranks: tuple[int, ...] = ()
    area_bytes_max: int = NO_LIMIT

    def of(self, layout: Layout) -> Layout:
        """`layout` with these ranks spared; with none, if an area would be too large or a chunk have too many senders.

        The result is the same on every rank, because nothing else is looked at.
        """
        if layout.spared:
            layout = layout.sparing(())
        if not self.ranks:
            return layout
        try:
            spared = layout.sparing(self.ranks)
        except ProtocolError:
            return layout
        if self.area_bytes_max < NO_LIMIT and max(areas_of(spared)) > self.area_bytes_max:
            return layout
        return spared

    def to_json(self) -> dict[str, Any]:
        return {"spared": list(self.ranks), "area_bytes_max": self.area_bytes_max}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Sparing:
        """Read the fields of a message.

        Raises:
            ProtocolError: A field is missing or wrong.
        """
        ranks = document.get("spared")
        if not (
            isinstance(ranks, list)
            and len(ranks) <= _RANKS_MAX
            and all(type(rank) is int and 0 <= rank < _RANKS_MAX for rank in ranks)
            and ranks == sorted(set(ranks))
        ):
            raise ProtocolError(f"SAVE_AT: spared is {ranks!r:.80}, expected ranks, ascending")
        return cls(tuple(ranks), _bytes(document, "SAVE_AT"))


NOBODY = Sparing()


def warning_of(layout: Layout, rank: int, name: str) -> str:
    """A line about the bytes that only this spared rank can send; empty where other ranks hold all of them."""
    spared = set(layout.spared)
    nbytes = 0
    for number, entry in enumerate(layout.entries):
        pattern = layout.pattern_of(entry)
        region = None if pattern is None else pattern.region_of.get(rank)
        if pattern is None or region is None or not spared.issuperset(pattern.holders[region]):
            continue
        share = pattern.share(rank, number, spared)
        nbytes += 0 if share is None else share.end - share.first
    if not nbytes:
        return ""
    return (
        f"{name} holds {nbytes} bytes of split tensors that no rank which stays has: they are sent before all else, "
        "and if it is lost before that, the job resumes from the checkpoint before"
    )


@dataclass(frozen=True, slots=True)
class Ability:
    """The facts about itself that a rank states in each AT.

    Attributes:
        plan_seconds: How long its last plan took, areas included; 0 before the first.
        area_bytes_max: The largest staging area that it can have. None: local tiers keep its slices in slots of a fixed
            size, so no rank is spared.
    """

    plan_seconds: float = 0.0
    area_bytes_max: int | None = None

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"plan_seconds": self.plan_seconds} if self.plan_seconds else {}
        if self.area_bytes_max is not None:
            document["area_bytes_max"] = self.area_bytes_max
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Ability:
        """Read the fields of a message; missing ones have their defaults.

        Raises:
            ProtocolError: A field is wrong.
        """
        seconds = document.get("plan_seconds", 0.0)
        if not (type(seconds) in {int, float} and 0 <= seconds < _SECONDS_MAX):
            raise ProtocolError(f"AT: plan_seconds is {seconds!r:.80}, expected a number of seconds")
        return cls(float(seconds), _bytes(document, "AT") if "area_bytes_max" in document else None)


class Spares:
    """Chooses the ranks to spare: those whose machines are taken away, if the others can send their part. The stager's.

    Args:
        ranks: Number of training ranks.

    Attributes:
        in_force: The sparing that was appointed last.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._going: set[int] = set()
        self._abilities: dict[int, Ability] = {}
        self.in_force = NOBODY

    def go(self, ranks: Collection[int]) -> bool:
        """The machine of these ranks will be taken away. Returns whether that is news."""
        before = len(self._going)
        self._going.update(ranks)
        return len(self._going) > before

    def can(self, rank: int, ability: Ability) -> None:
        self._abilities[rank] = ability

    @property
    def wanted(self) -> Sparing:
        """The sparing of all ranks that go; of none if all go, or some rank cannot send more."""
        limits = [ability.area_bytes_max for ability in self._abilities.values()]
        known = [limit for limit in limits if limit is not None]
        if not 0 < len(self._going) < self._ranks or len(known) < self._ranks:
            return NOBODY
        return Sparing(tuple(sorted(self._going)), min(known))

    def plan_seconds(self, sparing: Sparing) -> float:
        """How long the ranks would need for the plan: the slowest one's last plan, longer as its area grows."""
        slowest = max((ability.plan_seconds for ability in self._abilities.values()), default=0.0)
        return slowest * self.growth(sparing)

    def growth(self, sparing: Sparing) -> float:
        """How many times as many bytes a rank with a slice then sends as without a spared rank."""
        return self._ranks / (self._ranks - len(sparing.ranks))


def _bytes(document: Mapping[str, Any], kind: str) -> int:
    value = document.get("area_bytes_max")
    if not (type(value) is int and 0 <= value <= NO_LIMIT):
        raise ProtocolError(f"{kind}: area_bytes_max is {value!r:.80}, expected bytes")
    return value
