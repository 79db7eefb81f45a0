"""The top of the page: what happened, in sentences, and what needs attention. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.telemetry.event_text import truncate
from holdfast.wire.step_proof import ProofVerdict
from operator_side.page.words import brief, dollars, moment, plural, share
from operator_side.report.facts import RunFacts

_NAMED_MAX = 3
_REASON_CHARACTERS_MAX = 160
_SLOWER_FACTOR = 2.0
_HALF_MIN = 10  # fewer checkpoints show no trend
_SLOW_RANK_FACTOR = 2.0
_MUCH_NOT_TAKEN = 0.1
_PHASE_NAMES = {
    "ended": "until the old job had ended",
    "launched": "until the new job was launched",
    "joined": "until its processes had joined",
    "restored": "to restore the state",
    "training": "to the first step",
}
_CAVEATS = {
    "drifted": "combined slices of ranks whose replicas differed",
    "doubtful": "may be torn, because something other than the optimizer changed the state",
}


class Hint(NamedTuple):
    """A problem that needs attention, and the section of the page that shows it."""

    text: str
    section: str


def summarize_run(facts: RunFacts) -> list[str]:
    if facts.begin_unix is None or facts.end_unix is None:
        return [
            "Nothing is known of this run: there is no checkpoint in the store, and no event in the logs."
        ]
    return [*_course(facts), *_interruptions(facts), *_resumes(facts), *_checkpoints(facts), *_time(facts)]


def _course(facts: RunFacts) -> Iterator[str]:
    assert facts.begin_unix is not None
    assert facts.end_unix is not None
    span = f"from {moment(facts.begin_unix)} to {moment(facts.end_unix)}, {brief(facts.end_unix - facts.begin_unix)}"
    if not facts.attempts:
        yield f"The record of the run reaches {span}; it does not say when the run trained and when it was idle."
        return
    last = facts.attempts[-1]
    how = {
        "done": "It ended well: every rank ended with exit code 0.",
        "stopped": "It was stopped.",
        "left": "It ended when the trainers left in order.",
    }.get(last.cause)
    if last.was_lost:
        how = f"It ended badly ({last.cause}): {truncate(last.message, _REASON_CHARACTERS_MAX)}."
        if facts.final_message and facts.final_message not in last.message:
            how += f" The supervisor's last message: {truncate(facts.final_message, _REASON_CHARACTERS_MAX)}."
    yield f"The run went {span}, in {plural(len(facts.attempts), 'attempt')}."
    yield how or (
        f"Attempt {last.number} was still running when the logs end; later events are not known."
        if not facts.final_message
        else f"The supervisor's last message: {truncate(facts.final_message, _REASON_CHARACTERS_MAX)}."
    )


def _interruptions(facts: RunFacts) -> Iterator[str]:
    found = facts.interruptions
    if not facts.attempts:
        return
    if not found:
        unknown = "The logs show no interruption, and do not say why attempts ended."
        yield "It was not interrupted." if facts.attempts[0].is_supervised else unknown
        return
    names = [
        f"at {moment(one.stopped_at_unix)} ({one.cause}: {truncate(one.message, _REASON_CHARACTERS_MAX)})"
        for one in (interruption.attempt for interruption in found[:_NAMED_MAX])
    ]
    more = f"; and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    yield f"It was interrupted {_times(len(found))}: {'; '.join(names)}{more}."
    back = [one.down_seconds for one in found if one.recovery is not None]
    if back:
        took = f"between {brief(min(back))} and {brief(max(back))}" if len(back) > 1 else brief(back[0])
        yield f"It took {took} from the first sign of a loss until all ranks trained again."
    never = [one for one in found if one.recovery is None]
    if never:
        yield f"After the loss of attempt {never[-1].attempt.number} training did not resume, as far as is known."
    known = [one.lost.seconds for one in found if one.lost is not None]
    if known:
        yield f"{brief(sum(known))} of work had to be done again."


def _resumes(facts: RunFacts) -> Iterator[str]:
    proofs = [one.proof for one in facts.attempts if one.proof is not None]
    if not proofs:
        return
    counts = Counter(proof.verdict for proof in proofs)
    wording = {
        ProofVerdict.VERIFIED: "continued as before, as the first step shows",
        ProofVerdict.DIFFERS: "differed",
        ProofVerdict.NOT_PROVEN: "not proven",
    }
    named = [f"{counts[verdict]} {words}" for verdict, words in wording.items() if counts[verdict]]
    yield f"{plural(len(proofs), 'resume')} compared with the attempt before: {'; '.join(named)}."
    for proof in [one for one in proofs if one.verdict is ProofVerdict.DIFFERS][:_NAMED_MAX]:
        yield f"{proof.text[:1].upper()}{proof.text[1:]}."


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def _checkpoints(facts: RunFacts) -> Iterator[str]:
    rows = facts.rows
    if not rows:
        yield "No checkpoint is known: neither the logs nor the store have one."
        return
    durable = [row for row in rows if row.durable_at_unix is not None]
    newest = facts.newest_good
    text = f"{plural(len(durable), 'checkpoint')} became durable"
    if newest is not None:
        read = "read back and found good" if newest.state == "verified" else "not read back yet"
        text += f"; the newest good one is step {newest.step} (attempt {newest.attempt}), {read}"
    yield text + "."
    yield from _shares([row.sealed for row in rows if len(row.sealed) > 1])
    bad = [row for row in rows if row.state == "bad"]
    if bad:
        them = "it" if len(bad) == 1 else "them"
        yield f"{plural(len(bad), 'checkpoint')} came back bad when read: restore does not use {them}."
    for state, what in _CAVEATS.items():
        found = [row for row in rows if row.state == state]
        if found:
            first = f"the first of them step {found[0].step} (attempt {found[0].attempt})"
            yield f"{plural(len(found), 'checkpoint')}, {first}, {what}: restore prefers an older one."
    broken = [row for row in rows if row.nonfinite]
    if broken:
        yield (
            f"Numbers that are not finite (NaN or infinite) are in {plural(len(broken), 'checkpoint')}; the first is "
            f"step {broken[0].step} (attempt {broken[0].attempt})."
        )
    for one in facts.incidents:
        if one.event == "set_aside":
            yield f"{one.text[:1].upper()}{one.text[1:]}."
        if one.event == "rewound":
            yield f"The run was {one.text}."
    if facts.checkpoints.skipped:
        causes = ", ".join(
            f"{count:,} {cause}" for cause, count in facts.checkpoints.causes.most_common(_NAMED_MAX)
        )
        yield f"{plural(len(facts.checkpoints.skipped), 'step')} got no checkpoint ({causes})."


def _shares(sealed: list[dict[str, float]]) -> Iterator[str]:
    """`sealed`: for each checkpoint of several stagers, when each share was written."""
    if not sealed:
        return
    (last, times), *_ = Counter(max(one, key=one.__getitem__) for one in sealed).most_common(1)
    behind = statistics.median(max(one.values()) - min(one.values()) for one in sealed)
    yield (
        f"Among {plural(len(sealed), 'checkpoint')} of several stagers, share {last} was the last to be written of "
        f"{times:,}; the last share came {brief(behind)} after the first at the median."
    )


def _time(facts: RunFacts) -> Iterator[str]:
    goodput = facts.goodput
    if goodput is None or goodput.share is None:
        return
    up = goodput.up_seconds
    about = "About " if goodput.is_estimate else ""
    part = share(goodput.parts["new work"], up)
    text = f"{about}{part} of the time went into work that was kept (goodput)"
    costs = sorted(goodput.parts.items(), key=lambda part: -part[1])
    worst = [
        f"{share(value, up)} into {name}"
        for name, value in costs
        if value > 0 and name not in {"new work", "between runs"}
    ]
    if worst:
        text += f", {', '.join(worst[:_NAMED_MAX])}"
    yield text + "."
    if goodput.dollars_per_hour is not None:
        yield (
            f"At {dollars(goodput.dollars_per_hour)} an hour it cost {dollars(goodput.dollars(up))}, of which "
            f"{dollars(goodput.dollars(goodput.overhead_seconds))} went into losses and checkpoints."
        )


# -- what to look at ---------------------------------------------------------------------------------------------------


def find_hints(facts: RunFacts) -> list[Hint]:
    """Return hints, the worst first."""
    parts = (_bad, _not_good_yet, _losses, _not_taken, _store, _stalls)
    return [hint for part in parts for hint in part(facts)]


def _bad(facts: RunFacts) -> Iterator[Hint]:
    bad = [row for row in facts.rows if row.state == "bad"]
    if bad:
        worst = bad[-1]
        note = f": {truncate(worst.note, _REASON_CHARACTERS_MAX)}" if worst.note else ""
        yield Hint(
            f"Step {worst.step} (attempt {worst.attempt}) was read back and is bad{note}. `holdfast verify` names the "
            "damage; check the store and the machine that wrote it.",
            "checkpoints",
        )
    drifted = [one for one in facts.incidents if one.event == "divergence"]
    if drifted:
        yield Hint(
            f"Replicas drifted apart at step {drifted[0].step}, first at {moment(drifted[0].at_unix)}: ranks that must "
            "be equal were not. Resume from a checkpoint before that step.",
            "troubles",
        )
    fenced = [one for one in facts.incidents if one.event == "fenced"]
    if fenced:
        yield Hint("Another writer took over the run: make sure that only one job writes to it.", "troubles")


def _not_good_yet(facts: RunFacts) -> Iterator[Hint]:
    staged = facts.checkpoints.newest("staged")
    durable = facts.checkpoints.newest("durable", "verified")
    if staged is not None and (
        durable is None or (staged.attempt, staged.step) > (durable.attempt, durable.step)
    ):
        yield Hint(
            f"Step {staged.step} (attempt {staged.attempt}) was staged and, as far as is known, never became durable. "
            "Check with `holdfast status` whether its flusher still runs.",
            "checkpoints",
        )


def _losses(facts: RunFacts) -> Iterator[Hint]:
    if not facts.interruptions:
        return
    worst = max(facts.interruptions, key=lambda one: one.cost_seconds)
    cost = "" if worst.dollars is None else f" ({dollars(worst.dollars)})"
    text = f"The loss of attempt {worst.attempt.number} cost the most: {brief(worst.cost_seconds)}{cost}"
    if worst.recovery is not None and worst.recovery.phases:
        phase, value = max(worst.recovery.phases.items(), key=lambda one: one[1])
        longest = f"{brief(value)} {_PHASE_NAMES.get(phase, phase)}"
        text += f"; the longest phase until training continued was {longest}"
    yield Hint(text + ".", "interruptions")
    crashed = [one for one in facts.interruptions if one.attempt.cause == "crashed"]
    if crashed:
        yield Hint(
            f"Attempt {crashed[-1].attempt.number} crashed by itself, not because of a preemption: "
            f"{truncate(crashed[-1].attempt.message, _REASON_CHARACTERS_MAX)}. "
            "Its ranks' output is in the log directory.",
            "interruptions",
        )


def _not_taken(facts: RunFacts) -> Iterator[Hint]:
    count, rows = len(facts.checkpoints.skipped), len(facts.rows)
    if count and count > _MUCH_NOT_TAKEN * (rows + count):
        cause, most = facts.checkpoints.causes.most_common(1)[0]
        yield Hint(
            f"{share(count, rows + count)} of the checkpoints were not taken, most of them ({most:,}) because of: "
            f"{cause}.",
            "declined",
        )


def _store(facts: RunFacts) -> Iterator[Hint]:
    held = [one for one in facts.incidents if one.event in {"flush_held", "flush_failed", "verify_failed"}]
    if held:
        yield Hint(
            f"The store failed {_times(sum(one.times for one in held))}, first at {moment(held[0].at_unix)}: "
            f"{truncate(held[0].text, _REASON_CHARACTERS_MAX)}",
            "troubles",
        )
    seconds = [row.pgt2_seconds for row in facts.rows if row.pgt2_seconds is not None]
    half = len(seconds) // 2
    if half >= _HALF_MIN:
        before, after = statistics.median(seconds[:half]), statistics.median(seconds[half:])
        if after > _SLOWER_FACTOR * before:
            yield Hint(
                f"Checkpoints became slower: the median time from save() to durable was {brief(before)} in the first "
                f"half of the run and {brief(after)} in the second.",
                "times",
            )


def _stalls(facts: RunFacts) -> Iterator[Hint]:
    of_rank: dict[int, list[float]] = {}
    for row in facts.rows:
        for rank, value in row.stalls.items():
            of_rank.setdefault(rank, []).append(value)
    if len(of_rank) < 2 or len(facts.rows) < _HALF_MIN:
        return
    medians = {rank: statistics.median(values) for rank, values in of_rank.items()}
    slowest = max(medians, key=lambda rank: medians[rank])
    usual = statistics.median(medians.values())
    if usual > 0 and medians[slowest] > _SLOW_RANK_FACTOR * usual:
        yield Hint(
            f"Checkpoints hold up rank {slowest} longer than the others: {brief(medians[slowest])} against "
            f"{brief(usual)} (medians), and all ranks wait for it.",
            "checkpoints",
        )
