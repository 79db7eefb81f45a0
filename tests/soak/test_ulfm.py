"""Nightly, more of tests/integration/test_ulfm.py."""

from __future__ import annotations

import pytest

from tests.integration import test_ulfm as nightly

pytestmark = [pytest.mark.mpi]

test_a_stopped_rank_is_named_and_when_it_goes_on_so_do_checkpoints = (
    nightly.check_a_stopped_rank_is_named_and_when_it_goes_on_so_do_checkpoints
)
