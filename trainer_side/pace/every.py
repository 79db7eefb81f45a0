"""Which interval holds for `Checkpointer.step()`: the script's, or that of the settings."""

from __future__ import annotations

import operator

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError

AUTO = "auto"


def chosen(every: int | str | None, config: TrainerConfig) -> int | None:
    """The interval that holds: the script's, or that of the settings; None: `auto`.

    Raises:
        ConfigError: It is neither `auto` nor a number of steps.
    """
    every = config.every if every is None else every
    if every == AUTO:
        return None
    try:
        steps = operator.index(every)  # type: ignore[arg-type]  # text is what may be wrong
    except TypeError:
        steps = -1
    if steps < 0:
        raise ConfigError(f'every: expected 0 or more steps, or "{AUTO}", got {every!r}')
    return steps
