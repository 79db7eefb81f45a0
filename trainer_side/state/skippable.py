"""The objects of the state that provide training's batches, and can skip some of them after `holdfast rewind`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.checkpoints.branches import Rewound
from holdfast.telemetry.events import EventLog
from trainer_side.state.tree import unwrap_per_rank

_log = logging.getLogger("holdfast.restore")


class Skippable:
    """Values of the state with a method `skip_batches(after, steps)`. False without any. Training thread."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        values = unwrap_per_rank(state).items()
        self._found = {name: value for name, value in values if hasattr(type(value), "skip_batches")}
        # Methods to call with the number of each step. Loaders that know the batches of a step need none.
        self.step_callbacks: list[Callable[[int], None]] = [
            value.stepped for value in self._found.values() if hasattr(type(value), "stepped")
        ]

    def __bool__(self) -> bool:
        return bool(self._found)

    def skip(self, rewound: Rewound, events: EventLog, *, rank: int) -> None:
        """Skip the batches; rank 0 logs it. StateError: a sampler does not know a step's size."""
        for first, last in rewound.skipped:
            for value in self._found.values():
                value.skip_batches(first - 1 - rewound.to_step, last - first + 1)
        if rank:
            return
        by = f" (by {', '.join(self._found)})" if rewound.skipped else ""
        _log.warning("the run was %s%s", rewound, by)
        events.emit(
            "rewound",
            {
                "from_step": rewound.from_step,
                "skipped": [[first, last] for first, last in rewound.skipped],
                "message": str(rewound),
                "why": rewound.reason,
            },
            step=rewound.to_step,
        )
