"""A way to checkpoint, in whole microseconds: what the replay knows of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.policy.cost import Cost

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US


def microseconds(seconds: float) -> int:
    """The nearest whole number of them."""
    return round(seconds * SECOND_US)


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one way to checkpoint behaves.

    Attributes:
        name: For people.
        stall_us: The training waits so long for each checkpoint.
        safe_us: From `save()` until it survives the loss of training machines: staged with a stager, else durable.
        durable_us: From `save()` until it is in the store; its place is taken for so long.
        restore_near_us: Restore where what was staged is still there.
        restore_store_us: Restore from the store.
        in_flight_max: Places: how many may be under way at once.
        stager: A node that keeps what is staged, and may be lost itself.
        lead_us: A notice comes so long before a loss, and is used for a checkpoint; 0: none, or not used.
        every_iteration: Saves after each iteration, whatever the interval.
    """

    name: str
    stall_us: int
    safe_us: int
    durable_us: int
    restore_near_us: int
    restore_store_us: int
    in_flight_max: int = 1
    stager: bool = False
    lead_us: int = 0
    every_iteration: bool = False

    def with_lead(self, lead_us: int) -> Strategy:
        """The same, told of a loss so long before."""
        name = self.name if not lead_us else f"{self.name}, {lead_us / SECOND_US:g} s notice"
        return replace(self, name=name, lead_us=lead_us)

    def cost(self, iteration_us: int) -> Cost:
        """What the policy (holdfast/policy/) needs to know of it."""
        return Cost(
            iteration_us / SECOND_US,
            self.stall_us / SECOND_US,
            self.safe_us / SECOND_US,
            self.durable_us / SECOND_US,
            self.in_flight_max,
        )


# Nobody can be better: each iteration is safe in the moment in which it ends, for nothing, and restored in no time.
# What is left is what a loss costs whoever checkpoints: machines that are not there, and processes that must start.
IDEAL = Strategy("ideal", 0, 0, 0, 0, 0, every_iteration=True)
