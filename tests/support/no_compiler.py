"""Keeps torch's compiler out of a training job: building an optimizer or DDP imports it, and no test job uses it.

The import takes a second of CPU in each rank, half of its start-up; over all test jobs it adds up to minutes. Call
this before making an optimizer, DDP or pipeline. The demo, the tutorial, the pages and the frameworks' examples run
with the compiler.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

__all__ = ["do_without_compiler"]


class _OptimizedModule:
    """Stands for the type of `torch.compile`'s result; no object here has that type."""


def do_without_compiler() -> None:
    """Replace the compiler by a stub with the few names that optimizers, DDP, FSDP2, pipelines and process groups use.

    These names suffice since torch 2.11; older versions get the real compiler.
    """
    if TorchVersion(torch.__version__) < "2.11":
        return
    nothing = types.ModuleType("torch._dynamo")
    answers = {
        "disable": lambda call, recursive=True, **_: call,
        "graph_break": lambda *_, **__: None,
        "utils": types.SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"),
        "trace_rules": types.SimpleNamespace(clear_lru_cache=lambda: None),
        "eval_frame": types.SimpleNamespace(OptimizedModule=_OptimizedModule),
        "OptimizedModule": _OptimizedModule,
        # DTensors read a setting of the compiler, which lives in a file of its own.
        "__path__": [str(Path(torch.__file__).with_name("_dynamo"))],
    }
    vars(nothing).update(answers)
    sys.modules["torch._dynamo"] = torch._dynamo = nothing
