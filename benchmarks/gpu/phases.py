"""The phases in their order, and the seconds that each may take on an H100 with 16 cores: 200 together.

The seconds come from rates of commit 9aff311 (docs/figures/data/gpu/h100-9aff311): memory is locked at 1.3 GB/s, a
checkpoint is kept at 11 GB/s and restored at 1.7, torch.save writes 1.1 GB/s, a step takes 67 ms, and a process has its
device after 6 s. docs/gpu.md has the sum for each phase.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PHASES", "SECONDS", "TimedPhase", "asked_for"]


@dataclass(frozen=True)
class TimedPhase:
    """One phase.

    Attributes:
        name: Of its JSON.
        module: Has `measure`.
        seconds_max: It must end so long after the phases before it should have; what they leave is added to it.
        alone: It runs in a process of its own.
        beside: It begins together with the phase before it, and shares the seconds of the first of such a group.
            Nothing that is timed may have this.
    """

    name: str
    module: str
    seconds_max: float = 0.0
    alone: bool = False
    beside: bool = False


# The most valuable phases come first: a machine may be taken away at any moment.
PHASES = (
    TimedPhase("facts", "benchmarks.gpu.device_facts", 12),
    TimedPhase("stall", "benchmarks.gpu.stall", 40),
    TimedPhase("waits", "benchmarks.gpu.host_waits", 8),
    TimedPhase("bandwidths", "benchmarks.gpu.bandwidths", 12),
    TimedPhase("steps", "benchmarks.gpu.step_times", 16),
    TimedPhase("exact", "benchmarks.gpu.exact", 34, alone=True),
    TimedPhase("jobs", "benchmarks.gpu.jobs", alone=True, beside=True),
    TimedPhase("tests", "benchmarks.gpu.device_tests", alone=True, beside=True),
    TimedPhase("peers-opened", "benchmarks.gpu.peers_opened", beside=True),
    TimedPhase("peers-lm_resiliency", "benchmarks.gpu.peers", 14),
    TimedPhase("peers-dcp", "benchmarks.gpu.peers", 11),
    TimedPhase("peers-torch_checkpointing", "benchmarks.gpu.peers", 12),
    TimedPhase("memory", "benchmarks.gpu.pressure", 8),
    TimedPhase("peers-holdfast", "benchmarks.gpu.peers", 13),
    TimedPhase("peers-torch_save", "benchmarks.gpu.peers", 20),
)
SECONDS = sum(phase.seconds_max for phase in PHASES)


def asked_for(words: list[str]) -> list[TimedPhase]:
    """The phases of these names, and the facts: no figure goes without them. `peers` is all of the peers.

    Raises:
        ValueError: There is no phase of one of the names.
    """
    for word in words:
        if not any(phase.name == word or phase.name.startswith(f"{word}-") for phase in PHASES):
            names = ", ".join(phase.name for phase in PHASES)
            raise ValueError(f"no such phase: {word}; there are {names}, and peers for all of the peers")
    wanted = {"facts", *words}
    return [phase for phase in PHASES if wanted & {phase.name, phase.name.partition("-")[0]}]
