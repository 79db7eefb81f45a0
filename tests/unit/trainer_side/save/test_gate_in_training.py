"""The gate in real training loops: the copy is the state at `save()`, and training ends as without it, bit for bit.

Each loop runs twice from the same seed: plain, and with a slow copy of all parameters and moments after every step,
layer by layer, as the copy thread does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.support.gate_copies import Copies
from trainer_side.save.gate import Gate
from trainer_side.state.split_tensor import local_of

STEPS, LAYERS, WIDTH = 6, 6, 48

Loop = Callable[[torch.nn.Module, Callable[[list[Optimizer]], Copies]], None]


def _model() -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _loss(model: torch.nn.Module, step: int, part: int = 0) -> torch.Tensor:
    torch.manual_seed(1000 * step + part)
    result: torch.Tensor = model(torch.randn(8, WIDTH)).square().mean()
    return result


def _adamw(model: torch.nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def plain(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies], **options: Any) -> None:
    optimizer = _adamw(model, **options)
    copies = begin([optimizer])
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        copies.save()


def foreach(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies]) -> None:
    plain(model, begin, foreach=True)


def fused(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies]) -> None:
    plain(model, begin, fused=True)


def in_backward(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies]) -> None:
    """An optimizer for each parameter that steps as soon as the gradient exists, and frees it."""
    optimizers = {one: torch.optim.AdamW([one], lr=0.01) for one in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizer = optimizers[parameter]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    copies = begin(list(optimizers.values()))
    for step in range(STEPS):
        _loss(model, step).backward()  # type: ignore[no-untyped-call]
        assert all(parameter.grad is None for parameter in model.parameters())
        copies.save()


def accumulation(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies]) -> None:
    """An update every second step; a save after each step, also between the two halves."""
    optimizer = _adamw(model)
    copies = begin([optimizer])
    for step in range(2 * STEPS):
        (_loss(model, step) / 2).backward()  # type: ignore[no-untyped-call]
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        copies.save()


def clipping(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies]) -> None:
    optimizer = _adamw(model)
    copies = begin([optimizer])
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, step).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        copies.save()


def scaled(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies]) -> None:
    """A GradScaler, which looks for infinities and skips steps that have one."""
    optimizer = _adamw(model, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    copies = begin([optimizer])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(model, step) * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        copies.save()
    assert scaler.get_scale() == 128.0, "no step was left out"


def scheduled(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies]) -> None:
    optimizer = _adamw(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)
    copies = begin([optimizer])
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        copies.save()


def data_parallel(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies]) -> None:
    """DDP over gloo, gradients as views of its buckets."""
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = _adamw(model)
    copies = begin([optimizer])
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(wrapped, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        copies.save()


def sharded(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies], **options: Any) -> None:
    """FSDP2: parameters and moments are DTensors. On several ranks: tests/integration/test_sharded_steps.py."""
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plain(model, begin, **options)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def sharded_foreach(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies]) -> None:
    sharded(model, begin, foreach=True)


def sharded_fused(model: torch.nn.Module, begin: Callable[[list[Optimizer]], Copies]) -> None:
    sharded(model, begin, fused=True)


LOOPS: list[Loop] = [
    plain,
    foreach,
    fused,
    in_backward,
    accumulation,
    clipping,
    scaled,
    scheduled,
    data_parallel,
    sharded,
    sharded_foreach,
    sharded_fused,
]


def _run(loop: Loop, *, gated: bool, hooks: bool = True) -> tuple[list[torch.Tensor], Copies]:
    model = _model()
    found: list[Copies] = []

    def begin(optimizers: list[Optimizer]) -> Copies:
        gate = Gate(optimizers) if gated else None
        if gate is not None and not hooks:
            gate.remove()
        found.append(Copies(gate, optimizers))
        return found[0]

    loop(model, begin)
    found[0].join()
    return [local_of(parameter).detach().clone() for parameter in model.parameters()], found[0]


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file: Path = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_training_goes_on_beside_the_copy_and_neither_changes_the_other(loop: Loop) -> None:
    expected, _ = _run(loop, gated=False)
    found, copies = _run(loop, gated=True)
    assert all(got.equal(want) for got, want in zip(found, expected, strict=True))
    assert not any(want.equal(first) for want, first in zip(expected, _model().parameters(), strict=True))
    assert copies.torn() == 0
    assert copies.waited_seconds > 0, "no update came while it was copied: this shows nothing"


@pytest.mark.parametrize("loop", [plain, in_backward, data_parallel, sharded], ids=lambda loop: loop.__name__)
def test_without_the_gate_the_copies_are_torn(loop: Loop) -> None:
    _, copies = _run(loop, gated=True, hooks=False)
    assert copies.torn() > 0


# -- foreach and fused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kernel"), [({"foreach": True}, "_multi_tensor_adam"), ({"fused": True}, "_fused_adam")]
)
@pytest.mark.parametrize("state", ["open", "nothing held", "one held"])
def test_a_single_optimizer_call_takes_all_parameters_unless_some_are_held(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kernel: str, state: str
) -> None:
    """foreach and fused are fast because one call takes all tensors: the gate must not split the call needlessly."""
    from torch.optim import adam

    model = _model()
    optimizer = _adamw(model, **options)
    gate = Gate([optimizer])
    _loss(model, 0).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    parameters = list(model.parameters())
    last = parameters[-1].untyped_storage().data_ptr()
    calls: list[int] = []
    real = getattr(adam, kernel)

    def counted(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        calls.append(len(params))
        real(params, *args, **kwargs)
        gate.release([last])  # the held parameter is copied only after the rest was updated

    monkeypatch.setattr(adam, kernel, counted)
    if state != "open":
        gate.close()
        gate.hold([last] if state == "one held" else [])
    optimizer.step()
    count = len(parameters)
    assert calls == ([count - 1, 1] if state == "one held" else [count])
