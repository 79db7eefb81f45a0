"""One optimizer step in pieces: parameters that are free are updated while others are still being copied.

    step() ─► hook ─► free ones now: step(view of them) ─► wait until more are free ─► … ─► step(view of the rest)

A view is an optimizer of the same class that shares state and options with the real one, and has only some of its
parameters. Updates of different parameters do not depend on each other in the optimizers named here, so the result is
the plain step's, bit for bit, for any pieces (tested for each optimizer); foreach and fused kernels run unchanged, on
fewer tensors at a time. This is the layer-wise update of LightCheck (ICCD 2023, section III-B) for these optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]

_INDEPENDENT = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "SGD", "SparseAdam"),
)
# These update a whole tensor at once: one that is split among ranks together with the other ranks.
_OF_WHOLE_TENSORS = ("Adafactor", "Muon")
COMPILED = (
    "the step of an optimizer is compiled (torch.compile), and pieces of it would be compiled one by one and may round "
    "differently: its updates wait for the whole copy"
)
_KNOWN_STEPS = {
    getattr(torch.optim, name).step.__qualname__: name for name in _INDEPENDENT if hasattr(torch.optim, name)
}


def unsplittable_reason(optimizer: Optimizer) -> str:
    """Return why the step of this optimizer cannot be split; empty if it can."""
    step = type(optimizer).step
    if not step.__module__.startswith("torch.optim") or step.__qualname__ not in _KNOWN_STEPS:
        return (
            f"{type(optimizer).__name__} has a step of its own, which may treat its parameters together; "
            "its updates wait for the whole copy"
        )
    if _is_compiled(step):
        return COMPILED
    if any(group.get("capturable") for group in optimizer.param_groups):
        return f"{type(optimizer).__name__} is capturable: a step in pieces cannot be part of a CUDA graph"
    return ""


def _is_compiled(step: Any) -> bool:
    """Whether the class of an optimizer has a compiled step, below or above the wrapper that calls the hooks."""
    while step is not None:
        if hasattr(step, "_torchdynamo_orig_callable") and not hasattr(step, "_torchdynamo_disable"):
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def collective_step_reason(optimizer: Optimizer) -> str:
    """Return why the next step of this optimizer is collective; empty if each rank takes it by itself.

    Split, it would run this rank's collective operations in another order than the other ranks': they would hang, or
    combine unrelated tensors. Only for an optimizer that `unsplittable_reason` accepts, once the gradients are
    computed.
    """
    name = _KNOWN_STEPS[type(optimizer).step.__qualname__]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            placed = _dtensor_placement(parameter)
            if placed is None or parameter.grad is None:
                continue
            if name in _OF_WHOLE_TENSORS:
                return (
                    f"{name} works on whole tensors, which are split among the ranks: its updates wait for the whole "
                    "copy"
                )
            state = optimizer.state.get(parameter, {}).values()
            for tensor in (parameter.grad, *state):
                if (other := _dtensor_placement(tensor)) is not None and other != placed:
                    return (
                        f"a step of {type(optimizer).__name__} brings gradients or moments from {other[1]} to "
                        f"{placed[1]}, together with the other ranks (tensor parallelism): its updates wait for the "
                        "whole copy"
                    )
    return ""


def _dtensor_placement(value: object) -> tuple[object, object] | None:
    """Mesh and placements of a DTensor; None for anything else."""
    spec = getattr(value, "_spec", None)
    return None if spec is None else (spec.mesh, spec.placements)


def split_step(
    optimizer: Optimizer,
    arguments: StepArguments,
    *,
    held: Callable[[torch.Tensor], bool],
    wait_for_more: Callable[[], None],
) -> StepArguments | None:
    """Update parameters as they become free; leave the last piece to the step that called the hook.

    Call it as the last of the optimizer's step-pre-hooks: hooks after it would see some parameters updated.
    `optimizer`: Accepted by `unsplittable_reason`. `arguments`: Those of `step()`, as a pre-hook gets them; the first
    is the optimizer. `held`: Whether a parameter, or a tensor of its state, is still being copied; never true again
    once false. `wait_for_more`: Returns when a held parameter may be free; called only while one is held.

    Returns arguments for the rest of the step, as a pre-hook returns them; None: nothing was held, step as usual.
    """
    args, kwargs = arguments
    groups = optimizer.param_groups
    # A parameter without a gradient is not updated, so there is no need to wait for it.
    left = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
    if not any(map(held, left)):
        return None
    if _makes_state(optimizer):
        # State is saved in the order of its creation on all ranks, which must not depend on the timing of a copy.
        while any(map(held, left)):
            wait_for_more()
        return None
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # below the wrapper that calls the hooks
    while True:
        blocked = {id(parameter) for parameter in left if held(parameter)}
        free = {id(parameter) for parameter in left} - blocked
        view = _optimizer_view(optimizer, free)
        if not blocked:
            return (view, *args[1:]), kwargs
        if free:
            step(view)
            left = [parameter for parameter in left if id(parameter) in blocked]
        wait_for_more()


def _makes_state(optimizer: Optimizer) -> bool:
    """Whether this step will make state for a parameter that has none yet: the first step, or an unfrozen layer."""
    groups = optimizer.param_groups
    if type(optimizer).step is torch.optim.SGD.step and not any(group.get("momentum") for group in groups):
        return False
    parameters = (parameter for group in groups for parameter in group["params"])
    return any(one.grad is not None and one not in optimizer.state for one in parameters)


def run_closure(arguments: StepArguments) -> tuple[StepArguments, bool]:
    """Run the closure of a step now, since no piece of the step may precede the gradients. Return arguments whose
    closure only returns the loss, and True; without a closure the arguments unchanged, and False.
    """
    args, kwargs = arguments
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return arguments, False
    with torch.enable_grad():
        loss = closure()
    if len(args) > 1:
        return ((args[0], lambda: loss, *args[2:]), kwargs), True
    return (args, {**kwargs, "closure": lambda: loss}), True


def _optimizer_view(optimizer: _Optimizer, wanted: Collection[int]) -> _Optimizer:
    """The same optimizer with only the parameters whose ids are `wanted`."""
    view: _Optimizer = object.__new__(type(optimizer))
    view.__dict__ = dict(vars(optimizer))
    view.param_groups = [
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) in wanted]}
        for group in optimizer.param_groups
    ]
    return view
