"""A link that is ready to offer, and the port by which the test simulates its stager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.trainer_side.stager_port import FakePort, make
from trainer_side.link.link import Link
from trainer_side.transfer import TransferState


@pytest.fixture
def port() -> FakePort:
    return FakePort()


@pytest.fixture
def link(port: FakePort) -> Iterator[Link]:
    link = make(port)
    yield link
    link.close(wait_for=TransferState.STAGED, seconds_max=0.0)
