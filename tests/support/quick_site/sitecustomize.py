"""On PYTHONPATH of a job: its processes start and end with less work.

Importing torch makes objects that live until the end. The garbage collector looks at them again and again while they
are made, and once more when the process ends; that is a third of the CPU of a rank that starts and ends.

A quarter of what is left of `import torch` registers Python kernels of tensors without data (`meta`) and what they are
made of. Compilers and DTensors need them, and with these they come; other jobs do without.
"""

import atexit
import gc
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)

_KERNELS = "torch._meta_registrations"
_WITH_THEM = {f"torch.{name}" for name in ("_decomp", "_dynamo", "_prims", "_refs", "utils._content_store")}


class _Later(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module in the place of the kernels, until a part of torch is imported that comes with them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == _KERNELS:
            return importlib.machinery.ModuleSpec(name, self)
        if name in _WITH_THEM:
            sys.meta_path.remove(self)
            if sys.modules.pop(_KERNELS, None) is not None:
                # These parts import each other in circles, which work from here only.
                importlib.import_module(_KERNELS)
        if (module := sys.modules.get(name)) is None:
            return None
        # The interpreter takes the module's own one when it was imported meanwhile.
        module.__spec__ = importlib.machinery.ModuleSpec(name, _Loaded(module))
        return module.__spec__

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


class _Loaded(importlib.abc.Loader):
    """Of a module that was imported while it was looked for: nothing is left to do."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec


sys.meta_path.insert(0, _Later())
