"""Trainings that change their state in many ways: through all sorts of optimizers, and by hand right after a save.

Each is a `Training`: `state` for a Checkpointer, `step` for one update, `saved` for changes right after `save()`.
Every update changes every parameter, so that two instants never look the same.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from trainer_side.save.hook_coverage import HookCoverage
from trainer_side.save.staging import CopyEngine
from trainer_side.save.tearing import SavedInstant

TENSORS, NUMEL = 24, 4096
VALIDATION_SECONDS = 0.01


class Training:
    """A typical training loop; each class below differs from it in one respect.

    Attributes:
        waits: `checkpointer.wait_copied`; patterns that wait call it before they change tensors by hand.
    """

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model: torch.nn.Module = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(NUMEL)) for _ in range(TENSORS)
        )
        self.optimizer: Any = self.make()
        self.waits: Callable[[], None] = lambda: None
        self.changing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def make(self) -> Any:
        return torch.optim.AdamW(self.parameters, lr=0.01)

    def gradients(self, step: int) -> None:
        for place, parameter in enumerate(self.parameters):
            parameter.grad = torch.full_like(parameter, 1.0 + (step + place) % 5)

    def step(self, step: int) -> None:
        self.gradients(step)
        self.optimizer.step()

    def saved(self, step: int) -> None:
        """Change tensors as the script does right after `save()`."""


class Momentum(Training):
    def make(self) -> Any:
        return torch.optim.SGD(self.parameters, lr=0.01, momentum=0.9, foreach=True)


class Fused(Training):
    """A fused optimizer: torch does not count the changes of its kernel."""

    def make(self) -> Any:
        return torch.optim.AdamW(self.parameters, lr=0.01, fused=True)


class InBackward(Training):
    """An optimizer for each parameter, stepped in the order of backward."""

    def make(self) -> Any:
        return [torch.optim.AdamW([parameter], lr=0.01) for parameter in self.parameters]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, **{f"o{place}": one for place, one in enumerate(self.optimizer)}}

    def step(self, step: int) -> None:
        self.gradients(step)
        for one in reversed(self.optimizer):
            one.step()


class _Lookahead(Optimizer):
    """Like timm's: never calls `Optimizer.__init__`, so hooks registered on this object never run."""

    def __init__(self, base: Optimizer) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._base_optimizer = base
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state = defaultdict(dict)
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._base_optimizer.step(closure)
        self._steps += 1
        if self._steps % 2 == 0:
            for group in self.param_groups:
                for fast in group["params"]:
                    state = self._base_optimizer.state[fast]
                    if "slow" not in state:
                        state["slow"] = fast.clone()
                    state["slow"].add_(fast - state["slow"], alpha=0.5)
                    fast.copy_(state["slow"])

    def state_dict(self) -> Any:
        return self._base_optimizer.state_dict()


class Lookahead(Training):
    def make(self) -> Any:
        return _Lookahead(torch.optim.AdamW(self.parameters, lr=0.01))


class _Unhooked(Optimizer):
    """Never calls `Optimizer.__init__`, and wraps no other optimizer."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self.param_groups = [{"params": parameters, "lr": 0.01}]
        self.defaults: dict[str, Any] = {}
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["moment"] = torch.zeros_like(parameter)
            self.update(parameter, state["moment"])

    def update(self, parameter: torch.Tensor, moment: torch.Tensor) -> None:
        assert parameter.grad is not None
        moment.mul_(0.9).add_(parameter.grad)
        parameter.sub_(moment, alpha=0.01)

    def state_dict(self) -> Any:
        state = {place: self.state[one] for place, one in enumerate(self.param_groups[0]["params"])}
        return {"state": state, "param_groups": []}


class Unhooked(Training):
    def make(self) -> Any:
        return _Unhooked(self.parameters)


class _Uncounted(_Unhooked):
    def update(self, parameter: torch.Tensor, moment: torch.Tensor) -> None:
        assert parameter.grad is not None
        moment.data.mul_(0.9).add_(parameter.grad)
        parameter.data.sub_(moment, alpha=0.01)


class Uncounted(Training):
    """Unhooked, and updates through `.data`: torch counts nothing."""

    def make(self) -> Any:
        return _Uncounted(self.parameters)


class Sharpness(Training):
    """SAM with its two steps: a climb to the worst point nearby, and back."""

    @torch.no_grad()
    def saved(self, step: int) -> None:
        self.gradients(step)
        for parameter in self.parameters:  # first_step
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=0.05)
        self.gradients(step + 1)
        for parameter in self.parameters:  # second_step, before the base optimizer's
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.05)


class ScheduleFree(Training):
    """`opt.eval()`; save; `opt.train()`: the weights are moved to their average and back."""

    @torch.no_grad()
    def step(self, step: int) -> None:
        super().step(step)
        self._move(0.9)

    @torch.no_grad()
    def saved(self, step: int) -> None:
        self._move(1 / 0.9)

    def _move(self, weight: float) -> None:
        for parameter in self.parameters:
            parameter.mul_(weight)


class Average(Training):
    """The weights of an average are swapped in for validation after each save, and out again."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def saved(self, step: int) -> None:
        torch._foreach_lerp_(self.average, [*map(torch.Tensor.detach, self.parameters)], 0.1)
        self.waits()
        with self.changing():
            kept = [parameter.detach().clone() for parameter in self.parameters]
            self.put(self.average)
            time.sleep(VALIDATION_SECONDS)
            self.put(kept)

    def put(self, values: list[torch.Tensor]) -> None:
        torch._foreach_copy_([*map(torch.Tensor.detach, self.parameters)], values)


class AverageThroughData(Average):
    def put(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data.copy_(value)


class AverageBesideTorch(Average):
    """The average is swapped in through numpy, as a framework outside torch would do it."""

    def put(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.detach().numpy()[:] = value.numpy()


class Swapped(Average):
    """Swaps by pointing the parameters at other memory; nothing is overwritten."""

    def put(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value.clone()


class PatientAverage(Average):
    """Waits for the copy before swapping."""


class AverageInContext(Average):
    """Waits for the copy before swapping, with a context manager."""


class Best(Training):
    """The best weights so far are loaded right after a save."""

    def __init__(self) -> None:
        super().__init__()
        self.best = {name: value.clone() for name, value in self.model.state_dict().items()}

    def saved(self, step: int) -> None:
        self.model.load_state_dict(self.best)


class Clipped(Training):
    """Weights are clipped through `.data` right after a save."""

    def saved(self, step: int) -> None:
        for parameter in self.parameters:
            parameter.data.mul_(0.99)


class RowsThroughData(Training):
    """A few rows of a table change through `.data` at the top of each step, so the sampled words may all stay the same.

    Attributes:
        begins: The first step that does so.
    """

    begins = 0

    def __init__(self) -> None:
        super().__init__()
        # The last in the order of updates, so that a running copy reaches it last.
        self.table = self.parameters[-1].view(64, 64)

    def saved(self, step: int) -> None:
        if step >= self.begins:
            self.touch(step)

    def touch(self, step: int) -> None:
        self.table.data[1 + step % 7, 3:5] *= 0.5


class RowsByNumpy(RowsThroughData):
    def touch(self, step: int) -> None:
        self.table.detach().numpy()[1 + step % 7, 3:5] *= 0.5


class RowsOfAll(RowsThroughData):
    """A few rows of every weight and of its moments: some are sent by one rank and some by another."""

    def touch(self, step: int) -> None:
        for parameter in self.parameters:
            for one in (parameter, self.optimizer.state[parameter]["exp_avg"]):
                one.data.view(64, 64)[1 + step % 7, 3:5] *= 0.5


class RowsOfAllByNumpy(RowsThroughData):
    def touch(self, step: int) -> None:
        for parameter in self.parameters:
            for one in (parameter, self.optimizer.state[parameter]["exp_avg"]):
                one.detach().numpy().reshape(64, 64)[1 + step % 7, 3:5] *= 0.5


class RowsInAThread(RowsThroughData):
    """Another thread changes the rows; it starts when `save()` has returned."""

    def touch(self, step: int) -> None:
        thread = threading.Thread(target=super().touch, args=(step,))
        thread.start()
        thread.join()


class RowsInTheMiddle(RowsThroughData):
    """Rows change between the gradients and the update."""

    def saved(self, step: int) -> None:
        pass

    def gradients(self, step: int) -> None:
        super().gradients(step)
        if step >= self.begins:
            self.touch(step)


class MomentsThroughData(RowsThroughData):
    """The state of the optimizer is edited by hand."""

    def touch(self, step: int) -> None:
        self.optimizer.state[self.parameters[-1]]["exp_avg"].data[65:68].mul_(0.5)


class WeightsClippedThroughData(RowsThroughData):
    """The few weights beyond a limit are clipped."""

    def touch(self, step: int) -> None:
        for parameter in self.parameters[-3:]:
            parameter.data.clamp_(max=float(parameter.data.max()) - 1e-3)


class UnhookedRows(RowsThroughData):
    """Rows change, and the optimizer calls no hook: only the next save can notice."""

    def make(self) -> Any:
        return _Unhooked(self.parameters)


class _Embeddings(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(64, 64, max_norm=1.0) for _ in range(TENSORS))


class Renormed(Training):
    """The forward pass shortens the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Embeddings()
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.5)

    def saved(self, step: int) -> None:
        for table in self.model.tables:  # type: ignore[union-attr]
            table(torch.arange(64))


def _of_a_package(package: str, make: Callable[[Any, list[torch.nn.Parameter]], Any]) -> type[Training]:
    class OfPackage(Training):
        """Uses an optimizer of `package`; skipped if that is not installed."""

        def make(self) -> Any:
            return make(importlib.import_module(package), self.parameters)

    return OfPackage


class _ScheduleFreePackage(Training):
    def make(self) -> Any:
        return importlib.import_module("schedulefree").AdamWScheduleFree(self.parameters, lr=0.01)

    def step(self, step: int) -> None:
        self.optimizer.train()
        super().step(step)
        self.optimizer.eval()

    def saved(self, step: int) -> None:
        self.optimizer.train()


class _ScheduleFreeWrapper(_ScheduleFreePackage):
    """Has an optimizer of torch inside, and is not one itself."""

    def make(self) -> Any:
        inner = torch.optim.SGD(self.parameters, lr=0.01)
        return importlib.import_module("schedulefree").ScheduleFreeWrapper(inner, momentum=0.9)


class _SharpnessPackage(Training):
    """Its first step climbs outside of `step()`, and so outside of any hook."""

    def make(self) -> Any:
        package = importlib.import_module("pytorch_optimizer")
        return package.SAM(self.parameters, torch.optim.SGD, lr=0.01, momentum=0.9)

    def step(self, step: int) -> None:
        self.gradients(step)
        self.optimizer.first_step()
        self.gradients(step + 1)
        self.optimizer.second_step()


class _Sharded(Training):
    """Parameters and moments are DTensors. The class sets up torch.distributed with one rank."""

    def make(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh  # takes a second: only where it is used
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (1,))
        parts = [distribute_tensor(parameter.detach(), mesh, [Shard(0)]) for parameter in self.parameters]
        self.model = torch.nn.ParameterList(map(torch.nn.Parameter, parts))
        return super().make()


class Sharded(_Sharded, Training):
    pass


class ShardedMomentum(_Sharded, Momentum):
    pass


class ShardedFused(_Sharded, Fused):
    pass


class ShardedInBackward(_Sharded, InBackward):
    pass


class FullySharded(Training):
    """Plain FSDP2. A forward pass without a backward pass leaves whole parameters in the modules."""

    def make(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(TENSORS // 2)))
        mesh = init_device_mesh("cpu", (1,))
        for layer in self.model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        return torch.optim.AdamW(self.parameters, lr=0.01)

    def gradients(self, step: int) -> None:
        self.optimizer.zero_grad()
        (self._out() - step).square().sum().backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def saved(self, step: int) -> None:
        self._out()
        assert all(type(one) is torch.nn.Parameter for one in self.parameters), "they were sharded again"

    def _out(self) -> torch.Tensor:
        out: torch.Tensor = self.model(torch.ones(8, 64))
        return out


class ShardedSharpness(_Sharded, Sharpness):
    """torch counts these changes in the DTensors."""


class ShardedBest(_Sharded, Best):
    pass


class ShardedAverage(_Sharded, Average):
    """Swaps by foreach kernels: torch does not count their changes of DTensors."""

    def put(self, values: list[torch.Tensor]) -> None:
        live = [*map(torch.Tensor.detach, self.parameters)]
        torch._foreach_zero_(live)
        torch._foreach_add_(live, values)


class ShardedMoments(Sharded):
    """Moments change through their local tensors, where torch counts it."""

    @torch.no_grad()
    def saved(self, step: int) -> None:
        for state in self.optimizer.state.values():
            state["exp_avg"].to_local()[-1] += 1.0


# Trainings that wait at the gate or for the copy: all of their saves are published.
WAITING: tuple[type[Training], ...] = (
    Training,
    Momentum,
    Fused,
    InBackward,
    Lookahead,
    Swapped,
    PatientAverage,
    AverageInContext,
)
# Trainings that change tensors during the copy, unless save() waits for it.
TEARING: tuple[type[Training], ...] = (
    Unhooked,
    Uncounted,
    Sharpness,
    ScheduleFree,
    Average,
    AverageThroughData,
    AverageBesideTorch,
    Best,
    Clipped,
    Renormed,
)
# Trainings that change a few bytes: torch does not count them, and the sampled words mostly miss them.
FEW_BYTES: tuple[type[RowsThroughData], ...] = (
    RowsThroughData,
    RowsByNumpy,
    RowsInAThread,
    RowsInTheMiddle,
    MomentsThroughData,
    WeightsClippedThroughData,
)
OF_ALL: tuple[type[RowsThroughData], ...] = (RowsOfAll, RowsOfAllByNumpy)
SHARDED_WAITING: tuple[type[Training], ...] = (
    Sharded,
    FullySharded,
    ShardedMomentum,
    ShardedFused,
    ShardedInBackward,
)
SHARDED_TEARING: tuple[type[Training], ...] = (ShardedSharpness, ShardedBest, ShardedAverage, ShardedMoments)
# By PACKAGE or PACKAGE:CLASS. Only tests/soak uses them: the project's environment lacks these packages.
PACKAGES: dict[str, type[Training]] = {
    "schedulefree": _ScheduleFreePackage,
    "schedulefree:ScheduleFreeWrapper": _ScheduleFreeWrapper,
    "timm": _of_a_package(
        "timm.optim", lambda timm, parameters: timm.Lookahead(torch.optim.AdamW(parameters, lr=0.01))
    ),
    "pytorch_optimizer": _of_a_package(
        "pytorch_optimizer", lambda package, parameters: package.Lion(parameters, lr=0.01)
    ),
    "pytorch_optimizer:Lookahead": _of_a_package(
        "pytorch_optimizer",
        lambda package, parameters: package.Lookahead(torch.optim.AdamW(parameters, lr=0.01)),
    ),
    "pytorch_optimizer:SAM": _SharpnessPackage,
    "bitsandbytes": _of_a_package(
        "bitsandbytes.optim", lambda package, parameters: package.AdamW(parameters, lr=0.01)
    ),
    "bitsandbytes:AdamW8bit": _of_a_package(
        "bitsandbytes.optim", lambda package, parameters: package.AdamW8bit(parameters, lr=0.01)
    ),
}


def never_compare(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Take a tensor as unchanged unless a counter or a sampled word shows otherwise: no comparison of all bytes."""
    put(SavedInstant, "find_uncounted_change", lambda *_: "")


def trust_everything(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """No save waits for its copy, even where hooks are missing: only detection protects the save."""
    put(HookCoverage, "record_save", lambda *_: True)


def see_nothing(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Disable detection too: the tests with these trainings must fail then."""
    trust_everything(put)
    for method in ("find_changed", "find_changed_in", "find_changed_at", "find_miscopied"):
        put(SavedInstant, method, lambda *_: "")


def copy_slowly(batch_seconds: float, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Slow the copy down, so that changes right after `save()` get into it."""
    copy = CopyEngine.copy_host

    def slowly(*arguments: Any) -> None:
        time.sleep(batch_seconds)
        copy(*arguments)

    put(CopyEngine, "copy_host", staticmethod(slowly))
