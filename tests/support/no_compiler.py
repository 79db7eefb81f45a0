"""Leave torch's compiler out of a training job: building an optimizer imports it, and nothing here uses it.

That is half of a rank's start-up; over all jobs of the tests it is minutes. Call it after torch.distributed is set up
and before the first optimizer is made.
"""

from __future__ import annotations

import sys
import types

__all__ = ["do_without_compiler"]


def do_without_compiler() -> None:
    """Put an empty one in its place."""
    nothing = types.ModuleType("torch._dynamo")
    nothing.disable = lambda call, recursive=True, **_: call  # type: ignore[attr-defined]
    nothing.graph_break = lambda *_, **__: None  # type: ignore[attr-defined]
    sys.modules["torch._dynamo"] = nothing
