"""Which interval holds for `Checkpointer.step()`: the script's, or that of the settings."""

from __future__ import annotations

from typing import Any

from holdfast.config import TrainerConfig
from trainer_side.whole_number import STEP_MAX, whole_number

AUTO = "auto"


def chosen(every: Any, config: TrainerConfig) -> int | None:
    """The interval that holds: the script's, or that of the settings; None: `auto`.

    Raises:
        ConfigError: It is neither `auto` nor a number of steps.
    """
    every = config.every if every is None else every
    if isinstance(every, str) and every == AUTO:
        return None
    return whole_number(
        every, "every", most=STEP_MAX, advice=f'give a number of training steps, 0 for none, or "{AUTO}"'
    )
