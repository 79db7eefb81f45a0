"""Causes are few words, whatever is said."""

from __future__ import annotations

import pytest

from holdfast.telemetry.causes import cause_of


@pytest.mark.parametrize(
    ("reason", "code", "cause"),
    [
        ("busy: the checkpoint before is still being sent", "", "busy"),
        ("rank 12: busy: the checkpoint before is still being sent", "", "busy"),
        ("rank 1: copy failed: no memory: none", "", "copy failed"),
        ("steps 3, 4 are still being received", "busy", "no room at the stager"),
        ("step 5: rank 1 is dead: it seems", "peer_lost", "a process was lost or late"),
        ("something", "fenced", "fenced"),
        ("Anything else", "", "other"),
    ],
)
def test_causes(reason: str, code: str, cause: str) -> None:
    assert cause_of(reason, code) == cause
