"""Nightly, more of tests/integration/test_breaking.py: the other threads and the other exceptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_breaking import ENDS, REGULAR, check_exception, check_tcp, check_tiers

pytestmark = [pytest.mark.mpi]


@pytest.mark.parametrize(("how", "thread"), [("council", "holdfast-council"), ("lane", "holdfast-tier-0-0")])
def test_a_thread_of_local_tiers(tmp_path: Path, how: str, thread: str) -> None:
    check_tiers(tmp_path, how, thread)


def test_the_payloads_of_tcp(tmp_path: Path) -> None:
    check_tcp(tmp_path, "payloads", "holdfast-payloads-1")


@pytest.mark.parametrize("how", sorted(ENDS.keys() - set(REGULAR)))
def test_an_exception_of_the_script_ends_the_block(tmp_path: Path, how: str) -> None:
    check_exception(tmp_path, how)
