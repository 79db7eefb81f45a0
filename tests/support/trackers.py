"""The libraries of W&B, TensorBoard and MLflow for tests: installed beside the environment, and read back.

`python -m tests.support.trackers --install` installs them into .services/trackers. Tests that need them run processes
with the variables of `environment`, and are skipped where the libraries are missing.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.job import QUICK_SITE, REPOSITORY

__all__ = ["HOME", "MISSING", "environment", "install"]

HOME = REPOSITORY / ".services" / "trackers"
_CONSTRAINTS = REPOSITORY / "constraints.txt"
_PACKAGES = ("mlflow-skinny", "tensorboard", "wandb")
MISSING = "W&B, TensorBoard and MLflow are not installed: `make trackers`"


def install() -> Path:
    """Install the libraries, once; several processes may call this at the same time.

    Raises:
        subprocess.CalledProcessError: pip failed; its output is in `stderr`.
    """
    HOME.parent.mkdir(exist_ok=True)
    stamp = HOME / "installed"
    wanted = _CONSTRAINTS.read_text(encoding="utf-8")
    with (HOME.parent / "trackers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
            shutil.rmtree(HOME, ignore_errors=True)
            # Install only packages that the environment lacks; --target alone would install all of them again.
            lacking = json.loads(_pip("--dry-run", "--report", "-", *_PACKAGES))["install"]
            names = [f"{one['metadata']['name']}=={one['metadata']['version']}" for one in lacking]
            _pip("--no-deps", "--target", str(HOME), *names)
            stamp.write_text(wanted, encoding="utf-8")
    return HOME


def _pip(*arguments: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(_CONSTRAINTS),
        *arguments,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def environment(directory: Path) -> dict[str, str]:
    """Variables that let a process find the libraries, and make all of them write below `directory` only."""
    return {
        "PYTHONPATH": os.pathsep.join((str(QUICK_SITE), str(REPOSITORY), str(HOME))),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(directory),
        "WANDB_CACHE_DIR": str(directory / "wandb-cache"),
        "WANDB_CONFIG_DIR": str(directory / "wandb-config"),
        "WANDB_DATA_DIR": str(directory / "wandb-data"),
        "WANDB_SILENT": "true",
        "WANDB_DISABLE_GIT": "true",
        "WANDB__DISABLE_STATS": "true",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": (directory / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        "DO_NOT_TRACK": "true",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.support.trackers", description=__doc__)
    parser.add_argument("--install", action="store_true", help="install them and end")
    if not parser.parse_args().install:
        parser.error("nothing to do; give --install")
    print(install())
