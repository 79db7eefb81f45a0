"""The main job under `holdfast run`: `python supervised.py OUT STEPS EVERY PAUSE_AT`. Attempt 1 pauses there.

Attempt N writes to OUT/cluster-N, as a start of tests/support/cluster.py does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.integration.jobs import train

if __name__ == "__main__":
    out, steps, every, pause_at = sys.argv[1:]
    attempt = int(os.environ["HOLDFAST_RUN_ATTEMPT"])
    sys.argv[1:] = [
        str(Path(out) / f"cluster-{attempt}"),
        steps,
        every,
        *([pause_at] if attempt == 1 else []),
    ]
    train.main()
