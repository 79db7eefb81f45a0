"""A way to checkpoint, as the replay sees it, in whole microseconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.policy.cost import Cost

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US


def microseconds(seconds: float) -> int:
    return round(seconds * SECOND_US)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to checkpoint."""

    name: str
    stall_us: int  # how long a save blocks the training thread
    safe_us: int  # from `save()` until it survives the loss of training machines: staged with a stager, else durable
    durable_us: int  # from `save()` until it is in the store; it counts as in flight until then
    restore_near_us: int  # how long a restore takes while the stager still has the checkpoint
    restore_store_us: int
    in_flight_max: int = 1
    stager: bool = False  # a separate node keeps staged checkpoints; it may be lost, too
    lead_us: int = 0  # from a preemption notice, which makes a checkpoint, to the loss; 0: unused
    every_iteration: bool = False  # saves after each iteration, for any interval

    def with_lead(self, lead_us: int) -> Strategy:
        """Return the same way to checkpoint, with a notice `lead_us` before each loss."""
        name = self.name if not lead_us else f"{self.name}, {lead_us / SECOND_US:g} s notice"
        return replace(self, name=name, lead_us=lead_us)

    def cost(self, iteration_us: int) -> Cost:
        """Return the same figures for holdfast.policy."""
        return Cost(
            iteration_us / SECOND_US,
            self.stall_us / SECOND_US,
            self.safe_us / SECOND_US,
            self.durable_us / SECOND_US,
            self.in_flight_max,
        )


# The upper bound: each iteration is safe when it ends, at no cost, and restored in no time. It still pays what a loss
# costs every strategy: missing machines, and the start of processes.
IDEAL = Strategy("ideal", 0, 0, 0, 0, 0, every_iteration=True)
