"""Azure: Scheduled Events of the metadata service; an event of type `Preempt` with this machine among its resources.

Azure gives at least 30 seconds. `NotBefore` is empty once the event has started: the deadline is then now. The first
request switches Scheduled Events on for the machine, which may take up to two minutes to answer; until then the watch
logs once that it gets no answer. `HOLDFAST_AZURE_METADATA_URL` moves the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from holdfast.notices.notice import Notice, NoticeKind
from trainer_side.notice.http import MetadataServer, json_object, unix_time
from trainer_side.notice.watch import SourceError

_URL = "http://169.254.169.254"
_URL_VARIABLE = "HOLDFAST_AZURE_METADATA_URL"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}


class Azure:
    """A `NoticeSource`. A request takes at most `seconds_max`."""

    name = "azure"

    def __init__(
        self, environ: Mapping[str, str], *, seconds_max: float = 2.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._server = MetadataServer(environ.get(_URL_VARIABLE) or _URL, seconds_max=seconds_max)
        self._clock = clock
        self._machine: str | None = None
        self._started_at: dict[str, float] = {}  # event → when it was first seen to have started

    def poll(self) -> list[Notice]:
        answer = self._server.request(_EVENTS, headers=_HEADERS)
        if answer.status != 200:
            raise SourceError(f"{self._server.url}{_EVENTS}: answered {answer.status}, expected 200")
        events = json_object(answer.body, _EVENTS).get("Events")
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise SourceError(f"{_EVENTS}: Events is {events!r:.80}, expected a list of objects")
        preempts = [event for event in events if event.get("EventType") == "Preempt"]
        return [notice for event in preempts if (notice := self._parse_event(event)) is not None]

    def is_present(self) -> bool:
        return bool(self._machine_name())

    def _parse_event(self, event: dict[str, object]) -> Notice | None:
        resources = event.get("Resources")
        if self._machine is None:
            self._machine = self._machine_name()
        # All machines of a scale set see each other's events. One without a known name takes every event for its own.
        if self._machine and isinstance(resources, list) and resources:
            names = {str(name).rsplit("/", 1)[-1].strip("_") for name in resources}
            if self._machine.strip("_") not in names:
                return None
        event_id = str(event.get("EventId", ""))[:64]
        not_before = event.get("NotBefore")
        if not_before:
            deadline_unix = unix_time(not_before, f"{_EVENTS}: NotBefore")
        else:
            deadline_unix = self._started_at.setdefault(event_id, self._clock())
        return Notice(NoticeKind.TERMINATE, deadline_unix, self.name, f"Preempt event {event_id}")

    def _machine_name(self) -> str:
        try:
            answer = self._server.request(_NAME, headers=_HEADERS)
        except SourceError:
            return ""
        return answer.body.strip() if answer.status == 200 else ""
