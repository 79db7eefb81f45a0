"""Nightly, more of tests/integration/test_bad_input.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_bad_input import check_a_second_stager

pytestmark = [pytest.mark.mpi]


def test_a_second_stager_elsewhere_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    check_a_second_stager(tmp_path, beside=False)
