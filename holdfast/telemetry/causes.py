"""The few words under which a step that was not taken is counted: in a rank's books, and in `/metrics`."""

from __future__ import annotations

import re

_CAUSE = re.compile(r"(?:rank \d+: )?([a-z][a-z ]{0,30}): ")
_CAUSES_OF_CODES = {
    "busy": "no room at the stager",
    "peer_lost": "a process was lost or late",
    "state": "the ranks' states differ",
    "store": "store",
    "damage": "damage",
}


def cause_of(reason: str, code: str = "") -> str:
    """The cause in a few words; one of not many, whatever the reason says.

    Args:
        reason: What was said; a rank's own begins with its cause and a colon.
        code: The error code, if the stager gave one.
    """
    if code:
        return _CAUSES_OF_CODES.get(code, code)
    match = _CAUSE.match(reason)
    return match[1] if match else "other"
