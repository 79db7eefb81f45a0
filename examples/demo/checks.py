"""The facts that must hold at the end of the demo. A check lists what is wrong; an empty list means the fact holds.

These checks do not trust holdfast: torch compares states, a Python process that cannot import holdfast opens files, and
Python's own zipfile tests archives.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Check", "check", "damaged_archives", "differences", "losses_differ", "open_without_holdfast"]

_OPEN_SECONDS_MAX = 120.0

# Runs with `python -I`: no PYTHONPATH, no working directory. The script removes traces of an editable install, then
# requires the import to fail, which proves that the files do not need holdfast.
_OPEN = """
import importlib, json, pathlib, sys
roles = ("holdfast", "trainer_side", "stager", "flusher", "operator_side")
holds_a_role = lambda path: any((pathlib.Path(path) / role / "__init__.py").exists() for role in roles)
sys.path[:] = [path for path in sys.path if not holds_a_role(path)]
sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in getattr(each, "__module__", "")]
for role in roles:
    try:
        importlib.import_module(role)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{role} is importable here, so this would prove nothing; install it editable for the demo")

import torch

def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b

for path in json.loads(sys.argv[1]):
    try:
        whole = torch.load(path, weights_only=True)
        mapped = torch.load(path, weights_only=True, mmap=True)
    except Exception as error:
        sys.exit(f"{path}: {type(error).__name__}: {error}")
    if not whole or not same(whole, mapped):
        sys.exit(f"{path}: read and mapped contents differ, or it is empty")
"""


@dataclass(frozen=True)
class Check:
    """One fact: the claim, and the violations found (none if the fact holds)."""

    claim: str
    wrong: str

    @property
    def holds(self) -> bool:
        return not self.wrong


def check(claim: str, wrong: Sequence[str]) -> Check:
    """Return a fact with its first few violations."""
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return Check(claim, "; ".join(wrong[:3]) + more)


def differences(expected: Any, got: Any, where: str = "") -> Iterator[str]:
    """Yield the differences of two states: keys, their order, types, dtypes, shapes, and every bit of every tensor."""
    if type(expected) is not type(got):
        yield f"{where}: {type(expected).__name__} became {type(got).__name__}"
    elif isinstance(expected, torch.Tensor):
        if (expected.dtype, expected.shape) != (got.dtype, got.shape):
            yield f"{where}: {expected.dtype} {tuple(expected.shape)} became {got.dtype} {tuple(got.shape)}"
        elif not torch.equal(_bits(expected), _bits(got)):
            unequal = int((_bits(expected) != _bits(got)).sum())
            yield f"{where}: {unequal} of {expected.nbytes} bytes differ"
    elif isinstance(expected, dict):
        if list(expected) != list(got):
            yield f"{where}: keys {list(expected)} became {list(got)}"
        for key in expected.keys() & got.keys():
            yield from differences(expected[key], got[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        if len(expected) != len(got):
            yield f"{where}: {len(expected)} items became {len(got)}"
        for index, (one, other) in enumerate(zip(expected, got, strict=False)):
            yield from differences(one, other, f"{where}/{index}")
    elif expected != got:
        yield f"{where}: {expected!r} became {got!r}"


def losses_differ(expected: dict[int, float], got: dict[int, float]) -> list[str]:
    """List the steps whose loss is not exactly the reference's."""
    return [
        f"step {step}: {expected.get(step)} became {loss}"
        for step, loss in got.items()
        if expected.get(step) != loss
    ]


def open_without_holdfast(files: Sequence[Path]) -> list[str]:
    """Open each file with plain torch, read and memory-mapped, in a process that cannot import holdfast."""
    return _run(["-I", "-c", _OPEN, json.dumps([str(file) for file in files])])


def damaged_archives(files: Sequence[Path]) -> list[str]:
    """Run `python -m zipfile -t` on each file, which checks every entry's CRC-32."""

    def wrong(output: str) -> str:  # zipfile exits with 0 even on damage; only its output tells
        return output if "corrupted" in output or "Done testing" not in output else ""

    return [
        f"{file.name}: {note}" for file in files for note in _run(["-m", "zipfile", "-t", str(file)], wrong)
    ]


def _run(arguments: list[str], wrong: Callable[[str], str] | None = None) -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=_OPEN_SECONDS_MAX, check=False
    )
    said = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        return [said or f"exit code {done.returncode}"]
    note = wrong(said) if wrong is not None else ""
    return [note] if note else []


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, so that -0.0 differs from 0.0 and NaN equals itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
