"""The main job on hosts of a test: `python job.py OUT STEPS EVERY [STEP_SECONDS PAUSE_AT]`; attempt N writes to
OUT/cluster-N.

The script is tests/integration/jobs/train.py. Steps of the first attempt take STEP_SECONDS longer, and after step
PAUSE_AT (-1: none) it pauses, so that a fault can hit it in mid-run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.integration.jobs import train

WIDTH = "4096"


def main() -> None:
    out, steps, every, *first = sys.argv[1:]
    attempt = int(os.environ.get("HOLDFAST_RUN_ATTEMPT", "1"))
    step_seconds, pause_at = (*first, "-1")[:2] if first and attempt == 1 else ("0", "-1")
    os.environ["TRAIN_WIDTH"] = WIDTH
    os.environ["TRAIN_STEP_SECONDS"] = step_seconds
    sys.argv[1:] = [str(Path(out) / f"cluster-{attempt}"), steps, every, pause_at]
    train.main()


if __name__ == "__main__":
    main()
