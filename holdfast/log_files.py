"""Log files of background processes: the flusher, and the stager that a job starts for itself."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from holdfast.errors import ConfigError
from holdfast.ring.directory import run_key

_LAST_BYTES = 2000


def log_path(role: str, store_url: str) -> Path:
    """Return the log file for processes of this role and run. Raises `ConfigError`: its folder cannot be created."""
    folder = Path(platformdirs.user_state_dir("holdfast", appauthor=False))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} for the {role}'s log cannot be made: {error.strerror}; set XDG_STATE_HOME to a "
            "folder that you may write to"
        ) from error
    return folder / f"{role}-{run_key(store_url)}.log"


def last_lines(path: Path) -> str:
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
        return log.read().decode(errors="replace")
