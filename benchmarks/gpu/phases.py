"""The phases in their order, and the seconds that each may take on an H100 with 16 cores: 200 together.

The seconds come from a run of commit ac161b4c: holdfast's memory is locked at 2.0 GB/s and torch's at 1.5, copies take
55 GB/s, 12 GB are restored in 1.7 s, torch.save writes 1.0 GB/s, a step takes 67 ms (31 of the small model), and a
process has its device after 6 s. docs/gpu.md lists the phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PHASES", "SECONDS", "TimedPhase", "asked_for", "groups", "seconds_of"]


@dataclass(frozen=True)
class TimedPhase:
    """One phase.

    Attributes:
        module: Module with `measure`.
        seconds_max: Time limit of the phase, counted from the scheduled end of the earlier phases.
        alone: Whether the phase runs in a process of its own.
        together: Consecutive phases with the same word here run at the same time. Phases that measure times, or look at
            the device's free memory, must have none.
    """

    name: str
    module: str
    seconds_max: float
    alone: bool = False
    together: str = ""


# The most valuable phases come first: the machine may disappear at any moment. Those from `stall` to `waits` use the
# open Checkpointer with the large state, which `waits` closes: a process has one at a time.
PHASES = (
    TimedPhase("facts", "benchmarks.gpu.device_facts", 9),
    TimedPhase("stall", "benchmarks.gpu.stall", 29),
    TimedPhase("jobs", "benchmarks.gpu.jobs", 45, alone=True, together="untimed"),
    TimedPhase("exact", "benchmarks.gpu.exact", 45, alone=True, together="untimed"),
    TimedPhase("steps", "benchmarks.gpu.step_times", 16),
    TimedPhase("memory", "benchmarks.gpu.pressure", 6),
    TimedPhase("waits", "benchmarks.gpu.host_waits", 14),
    TimedPhase("peers-holdfast", "benchmarks.gpu.peers", 8),
    TimedPhase("peers-lm_resiliency", "benchmarks.gpu.peers", 9),
    TimedPhase("peers-dcp", "benchmarks.gpu.peers", 7),
    TimedPhase("peers-torch_checkpointing", "benchmarks.gpu.peers", 8),
    TimedPhase("bandwidths", "benchmarks.gpu.bandwidths", 8),
    # Looks at the device's free memory: nothing else may run then.
    TimedPhase("tests", "benchmarks.gpu.device_tests", 26, alone=True),
    TimedPhase("peers-torch_save", "benchmarks.gpu.peers", 8),
    # With the large state, each if there is time to lock its memory.
    TimedPhase("peers-large", "benchmarks.gpu.peers", 7),
)


def groups(phases: Sequence[TimedPhase]) -> list[list[TimedPhase]]:
    """Return the phases in groups that run at the same time."""
    found: list[list[TimedPhase]] = []
    for phase in phases:
        if phase.together and found and found[-1][0].together == phase.together:
            found[-1].append(phase)
        else:
            found.append([phase])
    return found


def seconds_of(phases: Sequence[TimedPhase]) -> float:
    """Return the seconds of all phases together."""
    return sum(max(phase.seconds_max for phase in group) for group in groups(phases))


SECONDS = seconds_of(PHASES)


def asked_for(words: list[str]) -> list[TimedPhase]:
    """Return the phases with these names, plus the facts, which every report needs. `peers` means all peers.

    Raises:
        ValueError: No phase has one of the names.
    """
    for word in words:
        if not any(phase.name == word or phase.name.startswith(f"{word}-") for phase in PHASES):
            names = ", ".join(phase.name for phase in PHASES)
            raise ValueError(f"no such phase: {word}; there are {names}, and peers for all of the peers")
    wanted = {"facts", *words}
    return [phase for phase in PHASES if wanted & {phase.name, phase.name.partition("-")[0]}]
