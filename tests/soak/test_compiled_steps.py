"""Nightly, more of tests/integration/test_compiled_steps.py."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.integration.test_compiled_steps import (
    MODES,
    PATTERNS,
    REGULAR,
    check_backward,
    check_inductor,
    check_variant,
    goes_on_exactly,
)


@pytest.mark.parametrize(("pattern", "mode"), sorted(set(product(PATTERNS, MODES)) - REGULAR))
def test_each_save_of_a_step_that_inductor_compiled_is_exact(
    pattern: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_inductor(monkeypatch, pattern, mode)


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"capturable": False, "amsgrad": True}]
)
def test_variants_of_an_optimizer_in_a_compiled_step_are_exact(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_variant(monkeypatch, options)


@pytest.mark.parametrize("pattern", ["backward and step", "step per parameter"])
def test_a_backward_pass_that_dynamo_alone_compiled_is_exact(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_backward(monkeypatch, pattern, "eager")


@pytest.mark.mpi
def test_a_compiled_training_under_torchrun_is_killed_and_goes_on_exactly(tmp_path: Path) -> None:
    goes_on_exactly("torchrun", tmp_path)
