"""Nightly, more of tests/integration/test_transfer.py."""

from __future__ import annotations

import pytest

from tests.integration import test_transfer as nightly

pytestmark = [pytest.mark.mpi]

test_a_killed_flusher_costs_no_step = nightly.check_a_killed_flusher_costs_no_step
test_images_larger_than_the_ring_arrive_bit_for_bit = (
    nightly.check_images_larger_than_the_ring_arrive_bit_for_bit
)
