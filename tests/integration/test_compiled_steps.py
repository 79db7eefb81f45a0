"""Compiled steps as users compile them: by inductor, backward passes as well, in jobs that are killed and resumed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.compiled_training import traced_code
from tests.unit.trainer_side.save.saving_training import (
    STEPS,
    Compile,
    SavingTraining,
    assert_same,
    by_backend,
    ends_without,
)

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _check(monkeypatch: pytest.MonkeyPatch, pattern: str, compiled: Compile, **options: object) -> None:
    with traced_code() as traced:
        wanted = ends_without(pattern, compiled, **options)
        saving = SavingTraining(monkeypatch, pattern, compiled, **options)
        saving.begin()
        saving.run(range(STEPS))
    assert_same(saving.training.tensors(), wanted)
    assert traced == set()
    assert saving.returned_before_copy[2:] == [pattern != "without the hooks"] * 2
    assert saving.checkpointer is not None
    saving.checkpointer.close()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("pattern", ["step and schedule", "whole", "save inside", "without the hooks"])
def test_each_save_of_a_step_that_inductor_compiled_is_exact(
    pattern: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy behind the gate takes the step whole: eager pieces of it are rounded otherwise."""
    _check(monkeypatch, pattern, by_backend("inductor", mode=mode))


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"capturable": False, "amsgrad": True}]
)
def test_variants_of_an_optimizer(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    _check(monkeypatch, "whole", by_backend("aot_eager"), **options)


@pytest.mark.parametrize("pattern", ["backward and step", "step per parameter"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_backward_pass(backend: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers that step in hooks of gradients are called out of compiled code."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        _check(monkeypatch, pattern, by_backend(backend))


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch traces no backward()"
)
def test_a_backward_pass_in_the_graph_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        _check(monkeypatch, "whole", by_backend("aot_eager"))
