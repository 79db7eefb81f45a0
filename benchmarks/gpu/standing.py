"""A standing stager for jobs of this machine: `python -m benchmarks.gpu.standing STORE RUNTIME`.

A bare machine has no command `holdfast`, so this module makes the stager from its settings, listening on loopback only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["standing"]

_ROOT = Path(__file__).resolve().parents[2]
_LISTENS_SECONDS_MAX = 60.0
_ENDS_SECONDS_MAX = 10.0
_LOOK_SECONDS = 0.02


@contextmanager
def standing(folder: Path) -> Iterator[dict[str, str]]:
    """Run a stager with its store in `folder`, which is created; yield the environment of its ranks.

    Raises:
        RuntimeError: The stager does not start to listen.
    """
    (folder / "store").mkdir(parents=True)
    store, runtime, log = folder / "store" / "run", folder / "runtime", folder / "stager.log"
    runtime.mkdir()
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.standing", str(store), str(runtime)],
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    try:
        deadline = time.monotonic() + _LISTENS_SECONDS_MAX
        while not (found := re.search(r"listens at (\S+)", log.read_text(errors="replace"))):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the stager does not listen:\n{log.read_text(errors='replace')[-1500:]}")
            time.sleep(_LOOK_SECONDS)
        yield {"HOLDFAST_STORE": str(store), "HOLDFAST_STAGER": found[1]}
    finally:
        process.terminate()
        try:
            process.wait(_ENDS_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _main() -> None:
    from holdfast.config import StagerConfig
    from stager.standing import StandingStager

    store, runtime = sys.argv[1:]
    config = StagerConfig.from_sources(store=store, runtime_dir=Path(runtime), listen="127.0.0.1:0")
    stager = StandingStager(config)
    print(f"listens at {stager.address}", flush=True)
    stager.run()


if __name__ == "__main__":
    _main()
