"""One attempt of a rewound training: `python tracked_branch.py OUT ATTEMPT`, without a Checkpointer.

Attempt 1 logs steps 0 to 5. Attempt 2 is rewound to step 2 and logs steps 3 to 6 of the other branch. OUT/runs.json has
the run of each tracker, as a checkpoint would.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainer_side.trackers import mlflow_tracker, tensorboard_tracker, wandb_tracker
from trainer_side.trackers.marking import MarkSender
from trainer_side.trackers.tracker import StartPoint


def main() -> None:
    out, attempt = Path(sys.argv[1]), int(sys.argv[2])
    runs = out / "runs.json"
    start = StartPoint(0, 1)
    if attempt == 2:
        start = StartPoint(3, 2, json.loads(runs.read_text()), "rewound to step 2", branched=True)
    trackers = [
        wandb_tracker.begin(start, {"project": "branch"}),
        tensorboard_tracker.begin(start, str(out / "events"), {}),
        mlflow_tracker.begin(start, {}),
    ]
    marking = MarkSender()
    for tracker in trackers:
        marking.add(tracker, start.marks(tracker.last_step))
        for step in range(start.first_step, 6 if attempt == 1 else 7):
            tracker.log({"loss": attempt * 100 + step}, step)
    marking.close()
    runs.write_text(json.dumps({tracker.kind: tracker.run_id for tracker in trackers}))
    trackers[0].run.finish()


if __name__ == "__main__":
    main()
