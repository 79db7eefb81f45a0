"""Nightly, more of tests/integration/test_changes.py: every training of tests/support/changes.py, 200 saves each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.jobs import changing
from tests.integration.test_changes import Outcome
from tests.support import changes

pytestmark = [pytest.mark.mpi]
SAVES = int(os.environ.get("TORN_SAVES", "200"))


@pytest.mark.timeout(300 + 2 * SAVES)
@pytest.mark.parametrize("kind", changing.kinds())
def test_a_published_file_is_the_saved_instant(tmp_path: Path, kind: str) -> None:
    if kind in changes.PACKAGES:
        pytest.importorskip(kind)
    outcome = Outcome(tmp_path, kind, SAVES)
    outcome.is_whole()
    print(f"{kind}: {len(outcome.published)} published, {len(outcome.withdrawn)} withdrawn")
    if kind in {training.__name__ for training in changes.WAITING}:
        assert not outcome.withdrawn


@pytest.mark.timeout(300 + 2 * SAVES)
@pytest.mark.parametrize("kind", [training.__name__ for training in changes.TEARING])
def test_without_detection_a_torn_file_is_published(tmp_path: Path, kind: str) -> None:
    """The test above can fail."""
    assert Outcome(tmp_path, kind, 20, "--blind").torn
