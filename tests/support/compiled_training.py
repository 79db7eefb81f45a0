"""Trainings with `torch.compile` around the optimizer's step, around more of a step, or around all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["PATTERNS", "CompiledTraining", "no_compiled_code", "traced_code"]

_ROOT = Path(__file__).resolve().parents[2]
_OURS = ("trainer_side", "holdfast")
WIDTH, LAYERS = 48, 2

PATTERNS = (
    "step",
    "step and schedule",
    "step of the optimizer",
    "backward and step",
    "whole",
    "save inside",
    "step per parameter",
    "without the hooks",
)


class CompiledTraining:
    """A small model and its training; `pattern` names the part that is compiled.

    Args:
        pattern: One of `PATTERNS`.
        compiled: `torch.compile` with its options.
        device: The model's.
        inside: The pattern `save inside` calls this with the step, in the compiled function.
        options: The optimizer's.
    """

    def __init__(
        self,
        pattern: str,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        device: str = "cpu",
        inside: Callable[[int], object] = lambda _: None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        layers = (
            torch.nn.Linear(WIDTH, WIDTH) for _ in range(1 if pattern == "step per parameter" else LAYERS)
        )
        self.model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(WIDTH, affine=False)).to(device)
        self.inputs = torch.randn(8, WIDTH, device=device)
        self.options = {"lr": 0.01, **options}
        self.optimizers: list[Optimizer] = [torch.optim.AdamW(self.model.parameters(), **self.options)]
        self.schedule: Any = None
        self.inside = inside
        self._compile = compiled
        self.step: Callable[[int], object] = getattr(self, "_" + pattern.replace(" ", "_"))()

    @property
    def state(self) -> dict[str, Any]:
        """For a `Checkpointer`."""
        numbered = {f"optimizer{number}": one for number, one in enumerate(self.optimizers)}
        return {"model": self.model, **numbered, **({"schedule": self.schedule} if self.schedule else {})}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors that training changes, by their path in a checkpoint."""
        found = {f"model/{name}": one for name, one in self.model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for index, of_parameter in optimizer.state_dict()["state"].items():
                for name, one in of_parameter.items():
                    found[f"optimizer{number}/state/{index}/{name}"] = one
        return {name: one.detach().clone() for name, one in found.items()}

    def _loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.inputs).square().mean()
        return loss

    def _backward(self) -> None:
        self._loss().backward()  # type: ignore[no-untyped-call]

    def _beside(self, update: Callable[[], object]) -> Callable[[int], object]:
        def step(_: int) -> None:
            self._backward()
            update()
            self.optimizers[0].zero_grad()

        return step

    def _step(self) -> Callable[[int], object]:
        """As in torch's tutorial on compiled optimizers."""
        (optimizer,) = self.optimizers
        return self._beside(self._compile(lambda: optimizer.step()))  # noqa: PLW0108 - as there

    def _step_and_schedule(self) -> Callable[[int], object]:
        """As in torch's tutorial on schedules: the rate is a tensor."""
        self.options["lr"] = torch.tensor(0.01, device=self.inputs.device)
        (optimizer,) = self.optimizers = [torch.optim.AdamW(self.model.parameters(), **self.options)]
        self.schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)

        def update() -> None:
            optimizer.step()
            self.schedule.step()

        return self._beside(self._compile(update))

    def _step_of_the_optimizer(self) -> Callable[[int], object]:
        (optimizer,) = self.optimizers
        optimizer.step = self._compile(optimizer.step)  # type: ignore[method-assign]
        return self._beside(optimizer.step)

    def _backward_and_step(self) -> Callable[[int], object]:
        """Two optimizers."""
        half = list(self.model.parameters())[:2]
        rest = [one for one in self.model.parameters() if not any(one is other for other in half)]
        first, second = self.optimizers = [
            torch.optim.AdamW(half, **self.options),
            torch.optim.SGD(rest, lr=0.01, momentum=0.9),
        ]

        def update(loss: torch.Tensor) -> None:
            loss.backward()  # type: ignore[no-untyped-call]
            first.step()
            second.step()

        compiled = self._compile(update)

        def step(_: int) -> None:
            compiled(self._loss())
            self.model.zero_grad()

        return step

    def _whole(self) -> Callable[[int], object]:
        (optimizer,) = self.optimizers

        def step() -> None:
            self._backward()
            optimizer.step()
            optimizer.zero_grad()

        compiled = self._compile(step)
        return lambda _: compiled()

    def _save_inside(self) -> Callable[[int], object]:
        (optimizer,) = self.optimizers

        def step(number: int) -> None:
            self._backward()
            optimizer.step()
            optimizer.zero_grad()
            self.inside(number)

        return self._compile(step)

    def _step_per_parameter(self) -> Callable[[int], object]:
        """Each parameter has an optimizer, which steps in backward as soon as the gradient is ready."""
        optimizers = {one: torch.optim.SGD([one], lr=0.01, momentum=0.9) for one in self.model.parameters()}
        self.optimizers = [*optimizers.values()]

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
        compiled = self._compile(self._backward)
        return lambda _: compiled()

    def _without_the_hooks(self) -> Callable[[int], object]:
        """Compiles the function below the one that calls the hooks, as torch's own tests do."""
        (optimizer,) = self.optimizers
        raw: Any = type(optimizer).step
        while hasattr(raw, "__wrapped__"):
            raw = raw.__wrapped__
        compiled = self._compile(raw)

        def update() -> None:
            with torch.no_grad():
                compiled(optimizer)

        return self._beside(update)


@contextmanager
def no_compiled_code() -> Iterator[None]:
    """For an autouse fixture: clears compiled code before and after the test."""
    # This import takes seconds of CPU; without it the first compiled step of each worker would pay for it.
    import torch._inductor.cudagraph_trees

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextmanager
def traced_code() -> Iterator[set[str]]:
    """The functions of holdfast that the compiler traces in the block, as frames of their own or inlined."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    found: set[str] = set()
    run = InstructionTranslatorBase.run

    def noted(self: Any) -> Any:
        place = Path(self.f_code.co_filename)
        if place.is_relative_to(_ROOT) and place.relative_to(_ROOT).parts[0] in _OURS:
            found.add(f"{place.relative_to(_ROOT)}: {self.f_code.co_name}")
        return run(self)

    InstructionTranslatorBase.run = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        InstructionTranslatorBase.run = run  # type: ignore[method-assign]
