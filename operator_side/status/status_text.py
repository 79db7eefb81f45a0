"""The wording of a status, for the terminal and for the page: processes, progress, loss by a kill. Not escaped."""

from __future__ import annotations

from collections import Counter

from holdfast.command.output import format_seconds
from holdfast.telemetry.status_document import StatusLine
from operator_side.page.words import clock, plural
from operator_side.status.loss import Loss
from operator_side.status.run_status import FAILURES, Peer, RunStatus

_RANK_STATES = ("here", "coming", "silent", "left", "lost")
_TRANSPORT_TEXT = {"tcp": ", over TCP, not encrypted", "tls": ", over TLS"}


def head_lines(status: RunStatus) -> list[str]:
    """Describe attempt, time and ranks, then stager and flusher."""
    where = f"{f'attempt {status.attempt}, ' if status.attempt else ''}{clock(status.now_unix)}"
    stager = f"{_peer('stager', status.stager, status)}{_TRANSPORT_TEXT.get(status.transport or '', '')}"
    return [f"{where}; {ranks_text(status)}", f"{stager}; {_peer('flusher', status.flusher, status)}"]


def _peer(name: str, peer: Peer, status: RunStatus) -> str:
    if peer.state == "gone":
        return f"no {name}"
    if name == "stager" and status.waits_at:
        return f"stager process {peer.pid} waits for a job at {status.waits_at}"
    process = "" if peer.pid is None else f" process {peer.pid}"
    if peer.state == "silent":
        return f"{name}{process} does not answer ({peer.note})"
    since = "" if peer.since_unix is None else f", {age(status.now_unix, peer.since_unix)}"
    return f"{name}{process}{since}"


def ranks_text(status: RunStatus) -> str:
    if not status.ranks:
        return "no training job is running" if not status.is_running else "the ranks are not known"
    counts = rank_counts(status)
    named = ", ".join(f"{counts[state]:,} {state}" for state in _RANK_STATES if counts[state])
    return f"{plural(status.ranks_total, 'rank')}: {named}"


def rank_counts(status: RunStatus) -> Counter[str]:
    """Count the ranks in each state. The status lists ranks in a worse state first; the unlisted ones are here."""
    counts: Counter[str] = Counter(rank.state for rank in status.ranks)
    counts["here"] += status.ranks_total - counts.total()
    return counts


def lost_steps(lost: Loss) -> str:
    """Format as `4`; `~4` if estimated; `?` if unknown."""
    return "?" if lost.steps is None else f"{'~' if lost.is_estimate else ''}{lost.steps}"


def resumes_from(lost: Loss) -> str:
    return "the beginning" if lost.since_step is None else f"step {lost.since_step}"


def line_text(line: StatusLine, now_unix: float) -> str:
    step = "" if line.step is None else f" step {line.step}"
    return f"{age(now_unix, line.at_unix)} ago {line.event}{step}: {line.text}"


def interval_lines(status: RunStatus) -> list[str]:
    """Describe the last interval, its reason, and how often the run is interrupted, as far as known."""
    lines, interval = [], status.interval
    if interval is not None:
        every = f"every {plural(interval.steps, 'step')} or {format_seconds(interval.seconds)}"
        lines.append(f"interval: {every}, from the last two saves")
        # `why` begins with the steps, shown in the first line, and ends with the failures, shown in the last line.
        why = interval.why.partition(FAILURES)[0].removeprefix(f"every {interval.steps} steps: ")
        lines += [f"  auto: {why}"] if why else []
    return [*lines, status.failures] if status.failures else lines


def age(now_unix: float, at_unix: float) -> str:
    return format_seconds(max(0.0, now_unix - at_unix))
