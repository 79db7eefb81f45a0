"""Leave torch's compiler out of a training job: building an optimizer or DDP imports it, and nothing here uses it.

That is half of a rank's start-up; over all jobs of the tests it is minutes. Call it after torch.distributed is set up
and before the first optimizer is made. The demo, the tutorial, the pages and the frameworks' examples run with it.
"""

from __future__ import annotations

import sys
import types

import torch

__all__ = ["do_without_compiler"]


def do_without_compiler() -> None:
    """Put an empty one in its place, with what optimizers and DDP ask of it."""
    nothing = types.ModuleType("torch._dynamo")
    answers = {
        "disable": lambda call, recursive=True, **_: call,
        "graph_break": lambda *_, **__: None,
        "utils": types.SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"),
    }
    vars(nothing).update(answers)
    sys.modules["torch._dynamo"] = torch._dynamo = nothing
