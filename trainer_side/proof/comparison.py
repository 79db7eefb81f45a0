"""The differences between a step of the previous run and the same step after a resume, and their usual causes. Pure.

same number of ranks    each rank's data, random numbers, learning rate, loss and gradient norm
another number          where the step began in the data, and the learning rate: the rest differs by rank
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from holdfast.wire.step_proof import ProofVerdict, ResumeProof
from trainer_side.proof.step_digest import StepDigest

_LAST_DIGITS = 1e-3  # relative tolerance for a 16-bit sum in another order
_SAME_RATE = 1e-12
_RANKS_NAMED_MAX = 4

DATA, RANDOM, RATE, LOSS, NORM = "data", "random numbers", "learning rate", "loss", "gradient norm"
CLASS = "class"
_ORDER = (DATA, RANDOM, CLASS, RATE, LOSS, NORM)
_INPUTS = (DATA, RANDOM, CLASS, RATE)
_UNSAVED = "something that training uses is not in the state, or the code has changed"
_CAUSES = {
    DATA: "the loader does not resume where the checkpoint was, or was read ahead of it: put a ResumableSampler "
    "into the state, or ResumableDraw around a function that draws batches ahead (docs/data.md)",
    RANDOM: 'put "rng": PerRank(RngState()) into the state; if it is there, something draws numbers between restore() '
    "and the first step, or in another thread",
    CLASS: "the checkpoint has the state of the one before, which the other reads in its own way",
    RATE: "is the scheduler in the state, and made after the optimizer as before?",
}


class StepDifference(NamedTuple):
    """One difference. `what`: an item of `_ORDER`; `text`: the values before and now."""

    what: str
    text: str


class Comparison(NamedTuple):
    """Comparison of a rank's steps."""

    compared: tuple[str, ...]  # the items of `_ORDER` that could be compared
    differences: tuple[StepDifference, ...] = ()
    notes: tuple[str, ...] = ()  # for people: no differences

    def to_json(self) -> list[Any]:
        return [self.compared, self.differences, self.notes]

    @classmethod
    def from_json(cls, body: Any) -> Self:
        compared, differences, notes = body
        return cls(tuple(compared), tuple(StepDifference(*one) for one in differences), tuple(notes))


def compare(before: StepDigest, now: StepDigest, *, same_ranks: bool) -> Comparison:
    """Compare the digests of one rank. `same_ranks`: False: `before` is the digest of any rank."""
    compared: list[str] = []
    found: list[StepDifference] = []
    for name in sorted(before.data.keys() & now.data.keys()):
        old, new = before.data[name], now.data[name]
        both = (old.keys() & new.keys()) if same_ranks else (old.keys() & new.keys() & {"from"})
        old, new = ({key: place[key] for key in both} for place in (old, new))
        if both:
            compared.append(DATA)
            if old != new:
                found.append(StepDifference(DATA, f"{name} {_format_place_change(old, new)}"))
    if same_ranks:
        _compare_rank_inputs(before, now, compared, found)
    found += _class_differences(before, now)
    for name in sorted(before.rates.keys() & now.rates.keys()):
        compared.append(RATE)
        old_rates, new_rates = before.rates[name], now.rates[name]
        if len(old_rates) != len(new_rates) or not all(map(_same_rate, old_rates, new_rates)):
            text = f"that of {name} was {_format_rates(old_rates)} before, and is {_format_rates(new_rates)}"
            found.append(StepDifference(RATE, text))
    notes = []
    results = (LOSS, before.loss, now.loss), (NORM, before.grad_norm, now.grad_norm)
    for what, old_number, new_number in results:
        if not same_ranks or old_number is None or new_number is None:
            continue
        compared.append(what)
        values = f"{old_number!r} before, {new_number!r} now"
        if old_number == new_number or (math.isnan(old_number) and math.isnan(new_number)):
            continue
        if not found and math.isclose(old_number, new_number, rel_tol=_LAST_DIGITS):
            notes.append(
                f"the {what} differs in its last digits only ({values}): kernels are not deterministic"
            )
        else:
            found.append(StepDifference(what, values))
    found.sort(key=lambda one: _ORDER.index(one.what))
    return Comparison(tuple(sorted(set(compared), key=_ORDER.index)), tuple(found), tuple(notes))


def _class_differences(before: StepDigest, now: StepDigest) -> Iterator[StepDifference]:
    """Yield the classes that differ. They are not among what is compared: equal ones prove nothing."""
    for name in sorted(before.classes.keys() & now.classes.keys()):
        kind_before, kind = before.classes[name], now.classes[name]
        if kind != kind_before:
            yield StepDifference(CLASS, f"{name} was {kind_before} before, and is {kind}")


def _compare_rank_inputs(
    before: StepDigest, now: StepDigest, compared: list[str], found: list[StepDifference]
) -> None:
    """Compare each rank's own batch and random numbers."""
    if before.batch is not None and now.batch is not None:
        compared.append(DATA)
        if before.batch != now.batch and not found:
            text = f"the batch has CRC-32 {now.batch:08x}, and had {before.batch:08x}"
            found.append(StepDifference(DATA, text))
    generators = [name for name in before.generators if name in now.generators]
    if generators:
        compared.append(RANDOM)
    if other := [name for name in generators if before.generators[name] != now.generators[name]]:
        found.append(StepDifference(RANDOM, f"the generator of {' and '.join(other)} is in another state"))


def resume_proof(by_rank: Sequence[Comparison | None], *, ranks_before: int) -> ResumeProof:
    """Return the verdict from the comparisons of all ranks.

    `by_rank`: None for a rank that has lost its record. A difference on any other rank counts, but the resume is
    verified only if every rank was compared. `ranks_before`: Number of ranks of the previous run.
    """
    ranks, comparisons = len(by_rank), [one for one in by_rank if one is not None]
    lost = [rank for rank, one in enumerate(by_rank) if one is None]
    missing = f"; nothing is recorded of {_format_ranks(lost)}" if lost else ""
    other = ""
    if ranks != ranks_before:
        other = (
            f"; {ranks} ranks instead of {ranks_before}, so each rank's batches, random numbers and loss cannot be "
            "compared"
        )
    differing = {one.what for each in comparisons for one in each.differences}
    items = [what for what in _ORDER if what in differing]
    if items:
        causes = dict.fromkeys((LOSS, NORM), _UNSAVED) | _CAUSES
        if any(what in _INPUTS for what in items):
            causes |= dict.fromkeys((LOSS, NORM), "")  # these follow from the inputs
        differences = "; ".join(
            ": ".join(part for part in (_format_difference(what, by_rank), causes[what]) if part)
            for what in items
        )
        text = f"resume differs from the run before: {differences}{other}{missing}"
        return ResumeProof(ProofVerdict.DIFFERS, text)
    compared = [what for what in _ORDER if all(what in one.compared for one in comparisons)]
    if not compared:
        return not_proven(f"the previous run's step recorded nothing that can be compared{other}")
    named = [f"the place in the {what}" if other and what == DATA else what for what in compared]
    verb = "is that" if len(named) == 1 and named[0] != RANDOM else "are those"
    if lost:
        had = _format_ranks([rank for rank in range(ranks) if rank not in lost])
        return not_proven(f"{missing[2:]}; {_join_words(named)} {verb} of the run before on {had}")
    notes = [*dict.fromkeys(note for one in comparisons for note in one.notes)][:1]
    if DATA not in compared:
        notes.append(
            "data could not be compared: give step() the batch, or put a ResumableSampler into the state"
        )
    text = f"resume verified: {_join_words(named)} {verb} of the run before{other}"
    return ResumeProof(ProofVerdict.VERIFIED, "; ".join([text, *notes]))


def not_proven(why: str) -> ResumeProof:
    """Return the verdict if the steps cannot be compared."""
    return ResumeProof(ProofVerdict.NOT_PROVEN, f"resume not proven: {why}")


def _format_ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, sorted(ranks)[:_RANKS_NAMED_MAX]))
    return f"rank {named}{' and others' if len(ranks) > _RANKS_NAMED_MAX else ''}"


def _format_difference(what: str, comparisons: Sequence[Comparison | None]) -> str:
    texts = {
        rank: one.text
        for rank, each in enumerate(comparisons)
        for one in reversed(each.differences if each is not None else ())
        if one.what == what
    }
    first = min(texts)
    if len(texts) == len(comparisons):
        where = "on every rank" if len(texts) > 1 else ""
    else:
        where = f"on {_format_ranks(list(texts))}"
    verb = "differ" if what in (DATA, RANDOM) else "differs"
    return " ".join(part for part in (what, verb, where, f"({texts[first]})") if part)


def _format_place_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    for end, verb in (("from", "began"), ("to", "ended")):
        if end in old and end in new and old[end] != new[end]:
            return f"{verb} at {_format_sample(old[end])} before, and at {_format_sample(new[end])} now"
    return "is at another place"


def _format_sample(place: Any) -> str:
    try:
        epoch, sample = place
    except (TypeError, ValueError):
        return str(place)
    return f"epoch {epoch}, sample {sample}"


def _same_rate(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SAME_RATE) or (math.isnan(one) and math.isnan(other))


def _format_rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" if float(f"{rate:g}") == rate else repr(rate) for rate in rates) or "none"


def _join_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
