"""What notices and intervals have the one who decides do: tell all ranks, or log it and write the event."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from holdfast.notices.decider import Appoint, Said
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.pace import Announce


def carry_out(
    calls: Sequence[Appoint | Announce | Said],
    kind: Kind,
    tell_all: Callable[[bytes], None],
    events: EventLog,
    *,
    attempt: int,
    log: logging.Logger,
) -> None:
    """Do `calls` in order; what goes to the ranks goes as `kind`. The thread of who decides."""
    for call in calls:
        if isinstance(call, Said):
            log.log(logging.ERROR if call.loud else logging.WARNING, "%s", call.text)
            events.emit(call.event, dict(call.fields))
            continue
        body = wire.to_json(call.body)
        tell_all(
            wire.encode(
                kind, attempt=attempt, step=call.step, flags=call.word.value, arg=call.number, body=body
            )
        )
