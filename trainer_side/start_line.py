"""The line that rank 0 logs once it has joined its job: how often it saves, where, and what it watches. Pure.

holdfast saves every 100 steps to s3://bucket/run through the stager node-0:29411 (attempt 1); watches SIGTERM for …
"""

from __future__ import annotations

from holdfast.config import OWN_PER_NODE, OWN_STAGER, TrainerConfig

_SIGNALS = ("sigterm", "sigusr1")


def start_line(
    config: TrainerConfig, *, every: int | None, store_url: str, attempt: int, stagers: int, fresh: bool
) -> str:
    """Return the line. `every`: Steps between two checkpoints; None: `auto`; 0: only `save()` takes any."""
    where = _stagers_text(config, store_url, stagers) if stagers else _tiers_text(config, store_url)
    begins = "; starts from scratch, because the script says fresh=True" if fresh else ""
    return f"holdfast saves {_interval_text(config, every)} {where} (attempt {attempt}){begins}; {_watch_text(config)}"


def _interval_text(config: TrainerConfig, every: int | None) -> str:
    if every is None:
        return (
            f"at the interval with the smallest expected loss, for at most {config.overhead_max * 100:g} % of the "
            f"time and at least every {config.every_seconds_max:g} s,"
        )
    if every == 0:
        return "where the script calls save(), and not by itself (every=0),"
    return "every step" if every == 1 else f"every {every} steps"


def _stagers_text(config: TrainerConfig, store_url: str, stagers: int) -> str:
    stager = "the stager" if config.stager is None else f"the stager {config.stager}"
    if len(config.stagers) > 1:
        stager = f"the stagers {', '.join(config.stagers)}"
    elif stagers > 1:
        stager = f"{stagers} stagers"
        if config.stager == OWN_PER_NODE:
            stager += " of this job, one on each node"
    elif config.stager in (OWN_STAGER, OWN_PER_NODE):
        stager = "a stager of this job on rank 0's machine"
    beside = f", and in {', '.join(config.tiers)}" if config.tiers else ""
    return f"to {store_url} through {stager}{beside}"


def _tiers_text(config: TrainerConfig, store_url: str) -> str:
    return f"in {', '.join(config.tiers)} alone and not to {store_url}"


def _watch_text(config: TrainerConfig) -> str:
    if not config.watch:
        return "watches for no preemption notices"
    names = [name.upper() if name in _SIGNALS else name for name in config.watch]
    return f"watches {', '.join(names)} for preemption notices"
