"""Leave torch's compiler out of a training job: building an optimizer or DDP imports it, and nothing here uses it.

That is a second of CPU in each rank, half of its start-up; over all jobs of the tests it is minutes. Call it before the
first optimizer, DDP or pipeline is made. The demo, the tutorial, the pages and the frameworks' examples run with the
compiler.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

__all__ = ["do_without_compiler"]


class _OptimizedModule:
    """What `torch.compile` would return, which nothing here is."""


def do_without_compiler() -> None:
    """Put an empty one in its place, with what optimizers, DDP, FSDP2, pipelines and process groups ask of it.

    That is what they ask since torch 2.11; before, they get the compiler.
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
        # DTensors ask for a setting of the compiler, which is a file of its own.
        "__path__": [str(Path(torch.__file__).with_name("_dynamo"))],
    }
    vars(nothing).update(answers)
    sys.modules["torch._dynamo"] = torch._dynamo = nothing
