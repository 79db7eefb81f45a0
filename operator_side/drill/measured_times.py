"""Recognizes values in logs that a clock has measured, so that they differ between any two runs.

    trainer/json/log_history/5/eval_runtime             measured
    trainer/json/log_history/5/eval_samples_per_second  measured
    trainer/json/log_history/5/eval_loss                not

Only values in logs are judged by their names: `time` in another part of the state may be training data.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_LOGS = re.compile(
    r"logs?|logged|logger|history|histories|metrics|perf(ormance)?|timers?|timings?|throughput|speed"
)
_TIMES = re.compile(
    r"times?|runtime|walltime|wallclock|clock|date|datetime|timestamps?|sec(ond)?s?|s|[mu]s|msec|minutes|hours|elapsed|"
    r"durations?|latency|eta|throughput|speed|mfu|tflops|[stfq]ps"
)
_COUNTED = re.compile(r"time_?steps?")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# In Trainer's entries: means over the steps since the last entry, or since the process began. A neighbour in the same
# entry identifies each.
_OF_THE_PROCESS = {"train_loss": "train_runtime", "loss": "grad_norm"}


def is_measured(path: str, siblings: Collection[str]) -> bool:
    """Whether the value is in a log, and is a time, a speed or a mean since the process began."""
    place, _, name = path.rpartition("/")
    if name == "elapsed" or "time_elapsed" in path.split("/"):  # Lightning's Timer
        return True
    if not _any_word(place, _LOGS):
        return False
    if name in _OF_THE_PROCESS:
        return f"{place}/{_OF_THE_PROCESS[name]}" in siblings
    return _any_word(name, _TIMES) and not _COUNTED.search(name.lower())


def _any_word(text: str, kind: re.Pattern[str]) -> bool:
    return any(kind.fullmatch(word.lower()) for word in _WORDS.findall(text))
