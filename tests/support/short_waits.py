"""Imported by TEST_ALSO (other_host_site): a flusher waits TEST_OTHERS_SECONDS for other machines."""

from __future__ import annotations

import os

from flusher import service, share_polls

_SECONDS = float(os.environ["TEST_OTHERS_SECONDS"])

for module, name, seconds in (
    (share_polls, "_OTHERS_SECONDS_MAX", _SECONDS),
    (share_polls, "_LEAD_SECONDS_MAX", 2 * _SECONDS),
    (service, "_OLD_STAGER_SECONDS_MIN", 0.5),
):
    assert isinstance(getattr(module, name), float)
    setattr(module, name, seconds)
