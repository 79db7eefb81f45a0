"""Results of a drill for each kill, from the logs of the run. Pure.

diary   the last step before the kill, and the samples of each step      events   what was staged before the kill
status  lost ─► ended ─► launched ─► joined ─► restored ─► training      compare  the files after the kill
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from operator_side.drill.compare import Difference, FileComparison
from operator_side.drill.kill_plan import Kill
from operator_side.supervise.record import MARKS, Resumption

Lines = Sequence[Mapping[str, Any]]
_NAMED_MAX = 5


class ExecutedKill(NamedTuple):
    """A kill that was carried out: when its notice and when its SIGKILL was sent."""

    kill: Kill
    notice_at: float | None
    killed_at: float


@dataclass
class KillFinding:
    """The result of one kill."""

    kill: Kill
    last_step: int = -1  # last step before the kill, of the most advanced rank
    # step of the checkpoint from which training resumed; -1: the beginning; None: it did not resume
    resumed_from: int | None = None
    staged_step: int = -1  # newest step that was staged before the kill
    lost_steps: int = 0
    lost_seconds: float = 0.0  # seconds that these steps had taken before the kill
    # Seconds from the kill to each mark of the resumption (`lost_seconds`, …); `seconds`: their sum.
    phases: dict[str, float] = field(default_factory=dict)
    notice: str = ""  # result of the notice; "" without a notice
    # steps whose files were compared with the reference, until the next kill
    compared: list[int] = field(default_factory=list)
    unequal: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool | None:
        """Whether the files after the kill equal the reference; None: no file could be compared."""
        return None if not self.compared else not self.unequal


class Samples(NamedTuple):
    """Numbers of samples of all ranks, over the steps that count."""

    trained: int
    skipped: int
    repeated: int  # samples that the drilled run trained on more often than the reference


def examine_kills(
    executed: Sequence[ExecutedKill],
    *,
    diary: Lines,
    events: Lines,
    status: Lines,
    files: Iterable[FileComparison],
) -> list[KillFinding]:
    findings = []
    for index, one in enumerate(executed):
        following = executed[index + 1].killed_at if index + 1 < len(executed) else float("inf")
        finding = KillFinding(one.kill)
        before = [line for line in diary if "step" in line and line["time"] <= one.killed_at]
        finding.last_step = max((int(line["step"]) for line in _newest_attempt(before)), default=-1)
        staged = [line for line in events if is_staged(line) and line["time"] < one.killed_at]
        finding.staged_step = max((int(line["step"]) for line in staged), default=-1)
        _add_recovery(finding, one, [line for line in status if one.killed_at <= line["time"] < following])
        if finding.resumed_from is None:
            finding.wrong.append("training did not resume after the kill")
        else:
            _add_losses(finding, one, before)
        if one.notice_at is not None:
            _add_notice(finding, [line for line in events if one.notice_at <= line["time"] <= following])
        findings.append(finding)
    _assign_files(findings, files)
    return findings


def _newest_attempt(lines: Lines) -> Lines:
    newest = max((line["attempt"] for line in lines), default=0)
    return [line for line in lines if line["attempt"] == newest]


def is_staged(line: Mapping[str, Any]) -> bool:
    return (line.get("event"), line.get("role")) == ("staged", "stager")


def _add_recovery(finding: KillFinding, executed: ExecutedKill, status: Lines) -> None:
    resumption = Resumption()
    resumption.record_loss(executed.killed_at)
    for line in status:
        event = line.get("event")
        if event == "lost":
            finding.phases.setdefault("seen_seconds", round(line["time"] - executed.killed_at, 3))
        elif event == "restored":
            finding.resumed_from = int(line["step"])
        if event == "training":
            finding.phases |= resumption.record_training(line["time"])
            return
        if event in MARKS[1:]:
            resumption.record_mark(str(event), line["time"])
    finding.resumed_from = None


def _add_losses(finding: KillFinding, executed: ExecutedKill, before: Lines) -> None:
    resumed = finding.resumed_from
    assert resumed is not None
    finding.lost_steps = max(0, finding.last_step - resumed)
    if finding.lost_steps:
        lines = _newest_attempt(before)
        done = [line["time"] for line in lines if line["step"] >= resumed]
        finding.lost_seconds = round(max(0.0, executed.killed_at - min(done, default=executed.killed_at)), 3)
    if resumed < finding.staged_step:
        finding.wrong.append(
            f"step {finding.staged_step} was staged before the kill, but training resumed from step {resumed}"
        )


def _add_notice(finding: KillFinding, events: Lines) -> None:
    by_event = {line["event"]: line for line in reversed(events) if line.get("role") == "stager"}
    if "notice" not in by_event:
        finding.notice = "it did not reach holdfast"
        finding.wrong.append(
            "the notice did not reach holdfast: `watch` is set without sigterm, or another handler takes SIGTERM"
        )
    elif "emergency_staged" in by_event:
        finding.notice = f"step {by_event['emergency_staged'].get('saved_step')} was saved because of it"
    else:
        answer = by_event.get("emergency_failed", by_event.get("emergency"))
        reason = "holdfast gave no answer" if answer is None else str(answer.get("reason"))
        finding.notice = f"nothing was saved: {reason}"
        if by_event.get("emergency", {}).get("choice") != "finish":
            finding.wrong.append(f"the notice led to no checkpoint: {reason}")


def _assign_files(findings: Sequence[KillFinding], files: Iterable[FileComparison]) -> None:
    """Assign each file to the last kill before it."""
    for one in files:
        resumed = [f for f in findings if f.resumed_from is not None and one.step > f.resumed_from]
        after = [finding for finding in resumed if one.step > finding.kill.after_step]
        if not after:
            continue
        finding = after[-1]
        finding.compared.append(one.step)
        if one.differs:
            finding.unequal.append(one.step)
            if len(finding.unequal) == 1:
                finding.wrong.append(
                    f"the checkpoint of step {one.step} differs from the undisturbed run: {shortened(one.differs)}"
                )
    for finding in findings:
        if len(finding.unequal) > 1:
            finding.wrong.append(
                f"{len(finding.unequal)} of {len(finding.compared)} checkpoints after the kill differ"
            )


def shortened(names: Sequence[Difference]) -> str:
    more = f", and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(str(name) for name in names[:_NAMED_MAX]) + more


def compare_samples(reference: Lines, drilled: Lines) -> Samples | None:
    """Compare the samples of the runs; a step that a resume did again counts once. None: no samples were recorded."""
    want, got = (_count_samples(Counter(_counted_spans(diary))) for diary in (reference, drilled))
    if not want and not got:
        return None
    more = {one: times - max(1, want[one]) for one, times in got.items()}
    return Samples(want.total(), (want - got).total(), sum(times for times in more.values() if times > 0))


def compare_counters(reference: Lines, drilled: Lines) -> list[str]:
    """Describe numbers on modules, which no checkpoint has, that differ between the runs at the same last step."""
    (last, want), (drilled_last, got) = _counters(reference), _counters(drilled)
    if last != drilled_last:
        return []
    return [
        f"{path} is {got[path]} after step {last}, and {number} in the undisturbed run"
        for path, number in want.items()
        if path in got and got[path] != number
    ]


def _counters(diary: Lines) -> tuple[int, dict[str, float]]:
    """Return the last step, and the numbers after it."""
    last, now = -1, dict[str, float]()
    for line in (line["counters"] for line in diary if "counters" in line):
        now = {**({} if line["begins"] else now), **line["values"]}
        last = int(line["step"])
    return last, now


_Span = tuple[int, int, int, int]


def _counted_spans(diary: Lines) -> list[_Span]:
    found: list[_Span] = []
    for rank in sorted({line["rank"] for line in diary}):
        steps: dict[int, list[_Span]] = {}
        attempt, waiting = -1, list[_Span]()
        for line in (line for line in diary if line["rank"] == rank):
            if line["attempt"] != attempt:
                attempt, waiting, first = line["attempt"], [], True
            if "samples" in line:
                epoch, place, count, length = line["samples"]
                waiting.append((epoch, place, count, length))
            elif "step" in line:
                if first:  # steps that an earlier attempt did after this one's first step do not count
                    steps = {step: spans for step, spans in steps.items() if step < line["step"]}
                steps[line["step"]], waiting, first = waiting, [], False
        found += [span for spans in steps.values() for span in spans]
    return found


def _count_samples(spans: Counter[_Span]) -> Counter[tuple[int, int]]:
    """Count each sample, by its epoch and its position in the epoch's order."""
    found: Counter[tuple[int, int]] = Counter()
    for (epoch, place, count, length), times in spans.items():
        for one in range(place, place + count):
            further, within = divmod(one, length)
            found[epoch + further, within] += times
    return found
