"""Settings of a supervised run: how many ranks, how often it is tried again, how long anything is waited for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a supervised run, units in the names.

    Attributes:
        ranks: Trainers that are wanted.
        ranks_min: It is not started with fewer.
        crashes_max: So many equal crashes in a row without progress end the run.
        restarts_max: So many relaunches in a row without progress end the run, whatever the cause.
        silent_seconds_max: A rank that has been silent for so long, beyond the stager's own deadline, is lost.
        lost_seconds_max: How long the others go on after a process of the job has died; not at all if it was killed
            before they had met.
        stall_seconds_max: No newer staged step for so long ends the attempt; None: not watched.
        grace_seconds: Time between asking the ranks to end and mpirun to end them.
        kill_seconds: Time between that and SIGKILL.
        hosts_seconds_max: How long to wait for enough hosts.
        look_seconds_max: How long to wait for the fleet's answer before a verdict.
    """

    ranks: int
    ranks_min: int
    crashes_max: int = 2
    restarts_max: int = 8
    silent_seconds_max: float = 30.0
    lost_seconds_max: float = 30.0
    stall_seconds_max: float | None = None
    grace_seconds: float = 30.0
    kill_seconds: float = 5.0
    hosts_seconds_max: float = 1800.0
    look_seconds_max: float = 30.0
