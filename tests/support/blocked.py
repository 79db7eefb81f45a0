"""An environment for subprocesses in which some packages cannot be imported, as if they were not installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_BLOCKER = '''
import sys


class Blocker:
    """Refuses the packages before any other finder sees them."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
        return None


sys.meta_path.insert(0, Blocker())
'''


def environment_without(directory: Path, packages: Sequence[str]) -> dict[str, str]:
    """The environment of this process, with a `sitecustomize` in `directory` that blocks `packages`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(_BLOCKER.replace("{packages!r}", repr(tuple(packages))))
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}
