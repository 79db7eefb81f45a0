"""Keeps torch.compile out of holdfast's code, also where a script compiles the code that calls it.

    compiled code ─► graph break ─► opaque(call) ─► runs as plain Python, with all that it calls ─► compiled code again

If traced, a wait would run only once, at compile time, and the state of the training would be a constant. The compiler
takes seconds to load, so this module uses it only after other code has loaded it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Item = TypeVar("_Item")
_Class = TypeVar("_Class", bound=type)

_REASON = (
    "holdfast runs between compiled graphs; with fullgraph=True, call it outside of the compiled function"
)
# Special methods that Python's syntax calls.
_SPECIAL = ("__init__", "__call__", "__enter__", "__exit__", "__iter__", "__next__", "__len__", "__getitem__")

_uncompiled: Callable[..., Any] | None = None  # `_run` with the compiler off
_codes: set[CodeType] = set()  # of `wrapper`: one for all functions, and one for all hooks


def opaque(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """The same function; compiled code breaks its graph at it. Not for generators: their bodies run in `next()`."""

    @functools.wraps(call)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        result: _R = (_uncompiled or _get_runner())(call, *args, **kwargs)
        return result

    return _disable_compilation(wrapper)


def opaque_hook(hook: Callable[..., _R]) -> Callable[..., _R]:
    """Return an opaque hook that also gets `compiled=`: whether the code that calls it is being compiled, or was."""

    def wrapper(*args: Any) -> _R:
        compiled = get_eval_frame_callback() is not None
        result: _R = (_uncompiled or _get_runner())(hook, *args, compiled=compiled)
        return result

    wrapper = _disable_compilation(wrapper)
    _get_runner()  # here, and not in the first step, which may be compiled
    return wrapper


def is_fake_mode() -> bool:
    """Whether torch works on shapes without contents in this thread: fake tensors, with which code is traced."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    from torch._guards import active_fake_mode

    return active_fake_mode() is not None


def opaque_methods(found: _Class) -> _Class:
    """Make all public methods and properties opaque. A generator among them is a TypeError."""
    for name, member in list(vars(found).items()):
        if name.startswith("_") and name not in _SPECIAL:
            continue
        if isinstance(member, FunctionType):
            if inspect.isgeneratorfunction(member):
                raise TypeError(f"{found.__name__}.{name} is a generator: return an OpaqueIterator of one")
            setattr(found, name, opaque(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(found, name, property(opaque(member.fget), member.fset, member.fdel, member.__doc__))
    return found


def _disable_compilation(wrapper: Callable[_P, _R]) -> Callable[_P, _R]:
    """Mark a function for the compiler, as `torch.compiler.disable` does."""
    vars(wrapper).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)
    _codes.add(wrapper.__code__)
    return wrapper


def _run(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def _get_runner() -> Callable[..., Any]:
    """Return `_run`; once the compiler is loaded, keep and return a version that runs with the compiler off."""
    global _uncompiled  # noqa: PLW0603 - one for the process, as the compiler is
    if "torch._dynamo" not in sys.modules:
        return _run
    # Compiled code calls them as frames of their own, which would be compiled as well without this mark.
    skip_code: Callable[[CodeType], object] = getattr(
        sys.modules.get("torch._dynamo.eval_frame"), "skip_code", lambda _: None
    )
    for code in _codes:
        skip_code(code)
    _uncompiled = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]
    return _uncompiled


class OpaqueIterator(Iterator[_Item]):
    """Yields the items of another iterator; compiled code breaks its graph at each."""

    def __init__(self, items: Iterator[_Item]) -> None:
        self._items = items

    @opaque
    def __next__(self) -> _Item:
        return next(self._items)


class OpaqueContext(AbstractContextManager[None]):
    """Enters and leaves another context; compiled code breaks its graph at both."""

    def __init__(self, context: AbstractContextManager[None]) -> None:
        self._context = context

    @opaque
    def __enter__(self) -> None:
        return self._context.__enter__()

    @opaque
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._context.__exit__(kind, error, trace)
