"""Nightly, more of tests/integration/test_slices.py."""

from __future__ import annotations

import pytest

from tests.integration import test_slices as nightly

pytestmark = [pytest.mark.mpi]

image = nightly.image
run_dir = nightly.run_dir
start = nightly.start
test_ranks_that_are_killed_anywhere_leave_the_newest_complete_set = (
    nightly.check_ranks_that_are_killed_anywhere_leave_the_newest_complete_set
)
test_a_flusher_that_is_killed_anywhere_is_followed_by_one_that_ends_it = (
    nightly.check_a_flusher_that_is_killed_anywhere_is_followed_by_one_that_ends_it
)
