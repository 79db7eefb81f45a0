"""A pytest plugin for tests on the late device: runs each under each policy; a broken rule of CUDA fails it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.late.control import LateMachine

__all__ = ["POLICIES"]

POLICIES = "side_lazy,lazy,eager,dice:1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--late-policies", default=POLICIES, help="the policies that each test runs under")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("late")
    policies = metafunc.config.getoption("--late-policies").split(",")
    if marker:  # those of its own policies that were requested; if there are none, all of its own
        policies = [policy for policy in marker.args if policy in policies] or marker.args
    metafunc.parametrize("late_policy", policies, indirect=True, scope="function")


@pytest.fixture(scope="session")
def late() -> LateMachine:
    """The late runtime of this process."""
    return LateMachine()


@pytest.fixture(autouse=True)
def late_policy(late: LateMachine, request: pytest.FixtureRequest) -> Iterator[str]:
    """The policy of this test: from its mark `late`, or from the command line."""
    import torch

    late.policy(request.param)
    yield request.param
    late.heal()
    late.policy("eager")
    for device in range(torch.cuda.device_count()):
        torch.cuda.set_stream(torch.cuda.default_stream(device))  # a failed capture leaves its own stream set
        torch.cuda.synchronize(device)
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    for device in range(torch.cuda.device_count()):
        # The next test must not leave room for the peak of this one.
        torch.cuda.reset_peak_memory_stats(device)
    assert late.violations() == []
