"""Steps compiled by inductor, backward passes included, in jobs that are killed and resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.jobs import compiled
from tests.support.cluster import Cluster, losses, same, wait_until
from tests.support.compiled_training import no_compiled_code, traced_code
from tests.support.job import Job
from tests.support.torchrun import by_torchrun
from tests.unit.trainer_side.save.saving_training import (
    STEPS,
    Compile,
    SavingTraining,
    assert_same,
    by_backend,
    ends_without,
)

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
SECONDS_MAX = 240


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    with no_compiled_code():
        yield


def _check(monkeypatch: pytest.MonkeyPatch, pattern: str, compile_by: Compile, **options: Any) -> None:
    with traced_code() as traced:
        wanted = ends_without(pattern, compile_by, **options)
        saving = SavingTraining(monkeypatch, pattern, compile_by, **options)
        saving.begin()
        saving.run(range(STEPS))
    assert_same(saving.training.tensors(), wanted)
    assert traced == set()
    assert saving.returned_before_copy[2:] == [pattern != "without the hooks"] * 2
    assert saving.checkpointer is not None
    saving.checkpointer.close()


# tests/soak/test_compiled_steps.py has the other pairs: inductor compiles for ten seconds each time.
MODES = ("default", "reduce-overhead")
PATTERNS = ("step and schedule", "whole", "save inside", "without the hooks")
REGULAR = {("step and schedule", "default"), ("whole", "reduce-overhead"), ("without the hooks", "default")}


@pytest.mark.parametrize(("pattern", "mode"), sorted(REGULAR))
def test_each_save_of_a_step_that_inductor_compiled_is_exact(
    pattern: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_inductor(monkeypatch, pattern, mode)


def check_inductor(monkeypatch: pytest.MonkeyPatch, pattern: str, mode: str) -> None:
    """The copy behind the gate takes the step whole: eager pieces of it are rounded otherwise."""
    _check(monkeypatch, pattern, by_backend("inductor", mode=mode))


def check_variant(monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]) -> None:
    """The optimizer's, in a step that is compiled as a whole."""
    _check(monkeypatch, "whole", by_backend("aot_eager"), **options)


@pytest.mark.parametrize("pattern", ["backward and step", "step per parameter"])
def test_a_compiled_backward_pass(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_backward(monkeypatch, pattern, "aot_eager")


def check_backward(monkeypatch: pytest.MonkeyPatch, pattern: str, backend: str) -> None:
    """Optimizers that step in hooks of gradients are called out of compiled code."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        _check(monkeypatch, pattern, by_backend(backend))


def test_a_backward_pass_in_the_graph_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch traces no backward()")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        _check(monkeypatch, "whole", by_backend("aot_eager"))


@pytest.mark.mpi
def test_a_compiled_training_is_killed_and_goes_on_exactly(tmp_path: Path) -> None:
    goes_on_exactly("forked", tmp_path)


def goes_on_exactly(launcher: str, tmp_path: Path) -> None:
    """With a stager; under torchrun with local tiers and without one."""
    ranks, steps, pause, saved = 2, 14, 8, 5
    under_torchrun = launcher == "torchrun"
    undisturbed, killed = (_cluster(tmp_path / name, under_torchrun) for name in ("undisturbed", "killed"))

    def start(cluster: Cluster, *arguments: str) -> Job:
        given = (str(steps), "aot_eager", *arguments)
        if under_torchrun:
            return cluster.start(ranks, *given, stager=False, rewrite=by_torchrun(ranks))
        return cluster.start(ranks, *given, forked=True)

    with start(undisturbed) as job:
        job.succeed(SECONDS_MAX)
    with start(killed, str(pause)) as job:
        out = killed.out(1)
        wait_until(
            lambda: all((out / f"paused-{rank}").exists() for rank in range(ranks)),
            SECONDS_MAX,
            f"no pause:\n{job.output()}",
        )
        for rank in range(ranks):
            os.kill(int((out / f"pid-{rank}").read_text()), signal.SIGKILL)
        job.kill()
    killed.wait_for_flusher()
    with start(killed) as job:
        job.succeed(SECONDS_MAX)
    for rank in range(ranks):
        wanted, end = (torch.load(one.out(one.started) / f"final-{rank}.pt") for one in (undisturbed, killed))
        assert end["begin"] == saved + 1
        assert same({**end, "begin": 0}, wanted)
        before, after = (losses(killed.out(number) / f"losses-{rank}") for number in (1, 2))
        assert set(after) == set(range(saved + 1, steps))
        assert {**before, **after} == losses(undisturbed.out(1) / f"losses-{rank}")


def _cluster(directory: Path, under_torchrun: bool) -> Cluster:
    (directory / "disk").mkdir(parents=True)
    env = {"HOLDFAST_ON_FULL": "wait", "TORCHINDUCTOR_CACHE_DIR": str(directory.parent / "inductor")}
    env["RANKS_IMPORT"] = "torch._inductor.cudagraph_trees"
    if under_torchrun:
        env |= {
            "HOLDFAST_TIERS": f"file:{directory / 'disk'}",
            "HOLDFAST_STORE": str(directory / "store"),
            "HOLDFAST_CHUNK_BYTES": "65536",
        }
    return Cluster(directory, str(directory / "store"), env, script=compiled.__file__)
