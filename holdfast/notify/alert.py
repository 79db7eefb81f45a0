"""Turns events into messages for people, and skips events that need none. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from holdfast.telemetry.event_text import event_text

_SENTENCE_CHARACTERS_MAX = 1000  # Discord takes 2000 with the title


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Alert(NamedTuple):
    """A message to people."""

    kind: str  # one word; the rate limit is per kind
    title: str  # a few words, in ASCII
    text: str  # a sentence
    severity: Severity


_ENDS = {
    "preempted": "preempted",
    "killed": "killed",
    "lost": "hosts or ranks lost",
    "crashed": "crashed",
    "unlaunched": "not launched",
}
# Without a supervisor only: `holdfast run` sends its own messages about these.
_ALONE: Mapping[tuple[str, str], tuple[str, str, Severity]] = {
    ("stager", "rank_lost"): ("lost", "hosts or ranks lost", Severity.WARNING),
    ("stager", "stopped"): ("over", "stager stopped", Severity.INFO),
    ("stager", "gave_up"): ("over", "stager gave up", Severity.ERROR),
}
# The field that is a whole sentence, for events without a `message`.
_SENTENCES = {"resume_proof": "text", "rank_lost": "reason"}
_PROOFS = {"verified resume": Severity.INFO, "differs": Severity.ERROR}
# (role, event) → kind, title, severity. Rows of the same kind share its rate limit.
_OTHERS: Mapping[tuple[str, str], tuple[str, str, Severity]] = {
    ("supervisor", "set_aside"): ("set_aside", "checkpoint set aside", Severity.WARNING),
    ("supervisor", "waiting"): ("waiting", "waiting for hosts", Severity.WARNING),
    ("supervisor", "ring_left"): ("ring_left", "checkpoints not in the store", Severity.ERROR),
    ("stager", "rank_silent"): ("silent", "a rank is silent", Severity.WARNING),
    ("stager", "flusher_lost"): ("flusher_lost", "flusher lost", Severity.WARNING),
    ("stager", "divergence"): ("divergence", "replicas differ", Severity.WARNING),
    ("stager", "doubt"): ("torn", "a checkpoint may be torn", Severity.WARNING),
    ("trainer", "stager_lost"): ("stager_lost", "stager lost", Severity.ERROR),
    ("trainer", "stager_back"): ("stager_back", "stager is back", Severity.INFO),
    ("flusher", "doubted"): ("torn", "a checkpoint may be torn", Severity.WARNING),
    ("flusher", "flush_held"): ("store_failing", "store is failing", Severity.WARNING),
    ("flusher", "flush_resumed"): ("store_back", "store works again", Severity.INFO),
    ("flusher", "flush_failed"): ("flush_failed", "a checkpoint was not stored", Severity.ERROR),
    ("flusher", "bad"): ("bad", "a stored checkpoint is damaged", Severity.ERROR),
    ("flusher", "verify_failed"): ("verify_failed", "a checkpoint was not read back", Severity.WARNING),
    ("flusher", "drifted"): ("divergence", "replicas differ", Severity.WARNING),
    ("flusher", "nonfinite"): ("nonfinite", "NaN or infinite values saved", Severity.WARNING),
    ("flusher", "fenced"): ("fenced", "another job writes this run", Severity.ERROR),
    ("flusher", "ring_lost"): ("ring_lost", "ring lost", Severity.ERROR),
}


def alert_for(fields: Mapping[str, Any], *, is_unsupervised: bool = False) -> Alert | None:
    """Return the message about an event, if people need one. `is_unsupervised`: no supervisor reports losses."""
    role, event = str(fields.get("role")), str(fields.get("event"))
    alone = _classify_unsupervised(role, event, fields) if is_unsupervised else None
    kind, title, severity = alone or _classify(role, event, fields)
    if not kind:
        return None
    text = _alert_text(event, fields)
    step = fields.get("step")
    if role != "supervisor" and type(step) is int:
        text = f"step {step}: {text}" if text else f"step {step}"
    return Alert(kind, title, (text or title)[:_SENTENCE_CHARACTERS_MAX], severity)


def _alert_text(event: str, fields: Mapping[str, Any]) -> str:
    if event == "stager_ended":
        lost = fields.get("lost_ranks")
        return f"ranks {lost} were lost" if lost else "every rank has left the stager"
    if event == "stager_ready":
        return f"the ranks had lost the stager, and have returned to it as attempt {fields.get('attempt')}"
    message = fields.get("message") or fields.get(_SENTENCES.get(event, ""))
    return message if isinstance(message, str) and message else event_text(fields)


def _classify_unsupervised(
    role: str, event: str, fields: Mapping[str, Any]
) -> tuple[str, str, Severity] | None:
    match role, event:
        case "stager", "resume_proof":
            return _classify("supervisor", event, fields)
        case "stager", "stager_ready" if fields.get("returned"):
            return "stager_back", "stager is back", Severity.INFO
        case "stager", "stager_ended":
            is_complete = not fields.get("lost_ranks")
            return "job_ended", "job ended", Severity.INFO if is_complete else Severity.WARNING
    return _ALONE.get((role, event))


def _classify(role: str, event: str, fields: Mapping[str, Any]) -> tuple[str, str, Severity]:
    cause = str(fields.get("cause"))
    match role, event:
        case "supervisor", "ended" if cause in _ENDS:
            return cause, _ENDS[cause], Severity.WARNING
        case "supervisor", "training" if "launched_seconds" in fields:  # the first attempt has none
            return "resumed", "resumed", Severity.INFO
        case "supervisor", "resume_proof":
            verdict = str(fields.get("verdict"))
            return "resume_proof", f"resume: {verdict}", _PROOFS.get(verdict, Severity.WARNING)
        case "supervisor", "over":
            if cause in {"done", "stopped"}:
                return "over", cause, Severity.INFO
            return "over", "gave up", Severity.ERROR
        case "stager", "notice" if fields.get("kind") == "terminate":
            return "notice", "preemption notice", Severity.WARNING
    return _OTHERS.get((role, event), ("", "", Severity.INFO))
