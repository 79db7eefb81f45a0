"""Compiled steps on a CUDA device: each save is exact and leaves training unchanged, with a mirror and behind the gate.

Mode `reduce-overhead` records graphs of inductor's kernels, and the backend `cudagraphs` graphs of torch's own kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.late.control import is_late
from tests.support.compiled_training import no_compiled_code, traced_code
from tests.unit.trainer_side.save.saving_training import (
    STEPS,
    Compile,
    SavingTraining,
    assert_same,
    by_backend,
    ends_without,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.late("lazy"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # the first that torch records
]
_NO_INDUCTOR = is_late() or importlib.util.find_spec("triton") is None
BACKENDS = {
    "aot_eager": by_backend("aot_eager"),
    "cudagraphs": by_backend("cudagraphs"),
    "reduce-overhead": by_backend("inductor", mode="reduce-overhead"),
}


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    with no_compiled_code():
        yield


@pytest.mark.parametrize("device_bytes_max", ["0", "1GiB"], ids=["gate", "mirror"])
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "cudagraphs",
            marks=pytest.mark.skipif(is_late(), reason="not seen to work on the late runtime yet"),
        ),
        pytest.param(
            "reduce-overhead",
            marks=pytest.mark.skipif(_NO_INDUCTOR, reason="needs triton and kernels that run"),
        ),
    ],
)
@pytest.mark.parametrize("pattern", ["step", "save inside"])
def test_each_save_of_a_compiled_step_is_exact(
    pattern: str, backend: str, device_bytes_max: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: Compile = BACKENDS[backend]
    with traced_code() as traced:
        wanted = ends_without(pattern, compiled, device="cuda")
        saving = SavingTraining(
            monkeypatch, pattern, compiled, device="cuda", device_bytes_max=device_bytes_max
        )
        saving.begin()
        saving.run(range(STEPS))
    assert_same(saving.training.tensors(), wanted)
    assert traced == set()
    assert saving.checkpointer is not None
    saving.checkpointer.close()
