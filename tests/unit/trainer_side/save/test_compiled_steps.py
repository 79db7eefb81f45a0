"""Compiled steps (`torch.compile`): exact saves, unchanged training, and no holdfast code in the trace.

The backend `inductor` and compiled backward passes take more CPU: tests/integration/test_compiled_steps.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.support.compiled_training import PATTERNS, no_compiled_code, traced_code
from tests.unit.trainer_side.save.saving_training import (
    STEPS,
    SavingTraining,
    assert_same,
    by_backend,
    ends_without,
)
from trainer_side.save import gate, split_step

# torch's own, where a loss crosses from one compiled part into the next.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    with no_compiled_code():
        yield


@pytest.mark.parametrize(
    ("backend", "pattern"),
    [
        *(("eager", pattern) for pattern in PATTERNS),
        ("aot_eager", "whole"),
        ("aot_eager", "without the hooks"),
    ],
)
def test_each_save_is_exact_and_training_ends_as_without(
    backend: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ends_without(pattern, by_backend(backend))
    saving = SavingTraining(monkeypatch, pattern, by_backend(backend))
    saving.begin()
    with traced_code() as traced:
        saving.run(range(STEPS))
    assert_same(saving.training.tensors(), wanted)
    assert traced == set()
    # Behind the gate as soon as the hooks are shown to be called; where they never are, no save is left to it.
    behind = [pattern != "without the hooks"] * 2
    assert saving.returned_before_copy[2:] == behind, saving.returned_before_copy
    assert saving.checkpointer is not None
    saving.checkpointer.close()


def test_an_update_in_compiled_code_waits_for_the_whole_copy_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Eager pieces may round otherwise than the compiled step."""
    monkeypatch.setattr(gate, "split_step", lambda *_, **__: pytest.fail("the step was taken in pieces"))
    saving = SavingTraining(monkeypatch, "backward and step", by_backend("eager"))
    saving.begin()
    saving.run(range(STEPS))
    said = [record.getMessage() for record in caplog.records if record.name == "holdfast.trainer.gate"]
    assert said == [split_step.COMPILED]
    assert saving.checkpointer is not None
    saving.checkpointer.close()


def test_hooks_of_a_step_that_was_compiled_before_are_called_and_saves_compile_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saving = SavingTraining(monkeypatch, "whole", by_backend("eager"))
    for number in range(2):
        saving.training.step(number)
    saving.begin()
    saving.run(range(3))
    graphs = dict(torch._dynamo.utils.counters["stats"])
    saving.run(range(3, 10))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs["unique_graphs"]
    assert saving.returned_before_copy[2:] == [True] * 8
    assert saving.checkpointer is not None
    saving.checkpointer.close()


def test_a_step_whose_class_compiles_it_is_not_taken_in_pieces() -> None:
    class Compiled(torch.optim.SGD):
        pass

    parameter = torch.nn.Parameter(torch.ones(4))
    assert split_step.unsplittable_reason(Compiled([parameter], lr=0.1)) == ""
    Compiled.step = torch.compile(torch.optim.SGD.step, backend="eager")  # type: ignore[method-assign]
    assert split_step.unsplittable_reason(Compiled([parameter], lr=0.1)) == split_step.COMPILED
    Compiled.step = torch.compiler.disable(torch.optim.SGD.step)  # type: ignore[method-assign, no-untyped-call]
    assert split_step.unsplittable_reason(Compiled([parameter], lr=0.1)) == ""


def test_a_whole_graph_is_refused_by_torch_in_words_that_name_holdfast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without holdfast it is refused as well: the step of each of torch's optimizers breaks the graph."""
    from torch._dynamo.exc import Unsupported

    saving = SavingTraining(monkeypatch, "step of the optimizer", by_backend("eager", fullgraph=True))
    with pytest.raises(Unsupported, match=r"graph_break"):
        saving.training.step(0)
    torch._dynamo.reset()
    saving.begin()
    with pytest.raises(Unsupported, match=r"(?s)holdfast runs between compiled graphs.*graph break"):
        saving.training.step(0)
    assert saving.checkpointer is not None
    checkpointer = saving.checkpointer
    with pytest.raises(Unsupported, match=r"(?s)holdfast runs between compiled graphs.*graph break"):
        torch.compile(lambda: checkpointer.step(0), backend="eager", fullgraph=True)()
    checkpointer.close()


def test_a_step_that_is_only_traced_is_neither_noted_nor_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    saving = SavingTraining(monkeypatch, "step", by_backend("eager"))
    saving.begin()
    saving.run(range(1))
    assert saving.checkpointer is not None
    coverage = saving.checkpointer._copier._hook_coverage
    monkeypatch.setattr(coverage, "record_hook", lambda _: pytest.fail("a traced step was taken for one"))
    optimizer = saving.training.optimizers[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        saving.checkpointer._copier.gate._hook(optimizer, (optimizer,), {}, compiled=False)
        assert not saving.checkpointer.save(1)
    assert "fake tensors" in saving.link.declined[1].text
    saving.checkpointer.close()
