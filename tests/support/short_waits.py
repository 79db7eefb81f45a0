"""In a process with TEST_ALSO (other_host_site): the flusher waits for other machines for seconds, not for minutes."""

from __future__ import annotations

from flusher import engine, service

OTHERS_SECONDS, LEAD_SECONDS, OLD_STAGER_SECONDS = 4.0, 40.0, 0.5

for module, name, seconds in (
    (engine, "_OTHERS_SECONDS_MAX", OTHERS_SECONDS),
    (engine, "_LEAD_SECONDS_MAX", LEAD_SECONDS),
    (service, "_OLD_STAGER_SECONDS_MIN", OLD_STAGER_SECONDS),
):
    assert isinstance(getattr(module, name), float)
    setattr(module, name, seconds)
