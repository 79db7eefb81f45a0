"""Public names of a package that are imported when a program first uses them (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

# Package that may be missing -> the extras that install it.
_EXTRAS = {"torch": ("torchrun", "trainer"), "mpi4py": ("trainer", "stager")}


def lazy_names(
    package: str, modules: Mapping[str, tuple[str, ...]], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package whose names are in expensive modules. `modules`: full name of
    each, with the names to take from it. `submodules`: modules of the package that are public names themselves.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> object:
        this = sys.modules[package]
        if name in submodules:
            return _import_for(f"{package}.{name}", name)
        if name not in homes:
            # `obj` lets Python add "Did you mean" from `dir` of the package.
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=this)
        value: object = getattr(_import_for(homes[name], name), name)
        setattr(this, name, value)  # so that Python calls `load` once per name
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *submodules})

    return load, names


def _import_for(module: str, needed_by: str) -> object:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        from holdfast.extras import install_line

        extras = _EXTRAS[error.name]
        named = " or ".join(f"[{extra}]" for extra in extras)
        raise ModuleNotFoundError(
            f"{needed_by} needs {error.name}, which is not installed. Holdfast's extra {named} has it; "
            f"or run: {install_line(extras[0])}",
            name=error.name,
        ) from error
