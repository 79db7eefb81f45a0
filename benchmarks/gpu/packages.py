"""The packages of holdfast that a bare machine lacks: taken from a folder of wheels, or from the index if it answers.

What cannot be had is left: phases that need it say so, and the others run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["ready"]

_ROOT = Path(__file__).resolve().parents[2]
_WHEELS = _ROOT / ".wheels"
_SECONDS_MAX = 60
# Module ─► package. torch is not among them: the machine's own is measured.
_NEEDED = {
    "annotated_types": "annotated-types",
    "dotenv": "python-dotenv",
    "isal": "isal",
    "platformdirs": "platformdirs",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "pydantic_settings": "pydantic-settings",
    "pytest": "pytest",
    "iniconfig": "iniconfig",
    "pluggy": "pluggy",
    "packaging": "packaging",
    "pygments": "pygments",
    "tenacity": "tenacity",
    "typing_inspection": "typing-inspection",
}


def ready(folder: Path) -> dict[str, str]:
    """Variables for Python that finds the tree and what was missing, which is put into `folder`. At most a minute."""
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        where = ["--no-index", "--find-links", str(_WHEELS)] if _WHEELS.is_dir() else ["--retries", "0"]
        command = [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"),
            *("--upgrade", "--target", str(folder), *where, "-c", str(_ROOT / "constraints.txt"), *missing),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_MAX, check=False)
            reason = done.stderr.strip()[-300:] if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
        if reason:
            print(f"not there: {', '.join(missing)}: {reason}", file=sys.stderr)
    paths = [
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
        str(_ROOT),
        *([str(folder)] if missing else []),
    ]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
