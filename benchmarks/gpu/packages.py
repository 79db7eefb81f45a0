"""Installs the packages of holdfast and its peers that a bare machine lacks, from a folder of wheels or from the index.

A package that cannot be installed is left out: phases that need it say so, and the others run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["find_peers", "ready"]

_ROOT = Path(__file__).resolve().parents[2]
_WHEELS = _ROOT / ".wheels"
_SECONDS_MAX = 60
_WHERE = "GPU_PEERS"
# Module ─► package. Not torch: the machine's own is measured.
_NEEDED = {
    "annotated_types": "annotated-types",
    "click": "click",
    "dotenv": "python-dotenv",
    "isal": "isal",
    "numpy": "numpy",
    "platformdirs": "platformdirs",
    "prometheus_client": "prometheus-client",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "pydantic_settings": "pydantic-settings",
    "pytest": "pytest",
    "iniconfig": "iniconfig",
    "pluggy": "pluggy",
    "packaging": "packaging",
    "pygments": "pygments",
    "rich": "rich",
    "tenacity": "tenacity",
    "typing_inspection": "typing-inspection",
}
# In the versions that peer_ways.py knows, as some of its figures come from their private attributes.
_PEERS = {
    "lm_resiliency": "lm-resiliency==0.2.0",
    "safetensors": "safetensors",
    "torch_checkpointing": "torch-checkpointing==0.1.1",
}


def ready(folder: Path) -> dict[str, str]:
    """Install missing packages into `folder`, within a minute; return Python's environment for them and this tree.

    Only `find_peers` makes the peers importable: otherwise each torchrun would import lm-resiliency, its plugin.
    """
    ends = time.monotonic() + _SECONDS_MAX
    peers = folder.with_name("peers")
    is_missing = False
    for packages, into in ((_NEEDED, folder), (_PEERS, peers)):
        missing = [
            package for module, package in packages.items() if importlib.util.find_spec(module) is None
        ]
        if missing:
            is_missing = is_missing or into == folder
            reason = _install(into, missing, ends - time.monotonic())
            # One by one, so that a missing package does not keep out the others.
            for package in missing if reason and len(missing) > 1 else ():
                _install(into, [package], ends - time.monotonic())
            if reason:
                print(f"not all there: {', '.join(missing)}: {reason}", file=sys.stderr)
    paths = [
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
        str(_ROOT),
        *([str(folder)] if is_missing else []),
    ]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path), _WHERE: str(peers)}


def find_peers() -> None:
    """Let this process import the peers that `ready` has installed."""
    if (folder := os.environ.get(_WHERE, "")) not in sys.path:
        sys.path.append(folder)


def _install(folder: Path, packages: list[str], seconds: float) -> str:
    """Install packages; return why that failed, or ""."""
    if seconds <= 0:
        return "no time was left"
    where = ["--no-index", "--find-links", str(_WHEELS)] if _WHEELS.is_dir() else ["--retries", "0"]
    command = [
        *(
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "-q",
            "--no-deps",
            "--no-compile",
        ),
        *("--upgrade", "--target", str(folder), *where, "-c", str(_ROOT / "constraints.txt"), *packages),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip()[-300:] if done.returncode else ""
