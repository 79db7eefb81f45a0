"""The ways of a training rank to its stager and to the other ranks, as everything above this room sees them.

    World ── StagerPort   control messages and payloads to the stager
        ├─── CouncilPort  messages among the ranks, for the local tiers
        ├─── RanksPort    messages among the ranks, for the error that ends one
        └─── Peers        bytes among the ranks, for restore (peers.py)

How the job was started decides who implements them (joined.py): `MpiWorld` under mpirun, `C10dWorld` elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from holdfast.errors import ConfigError, PeerLost
from trainer_side.ranks.peers import Peers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class GenerationOver(PeerLost):
    """The stager does not go on with this generation of the job's start; the ranks may come again as the next one."""


class StartReplaced(PeerLost):
    """The launcher has started the job again, so no stager serves this start of it any more."""


class StagerPort(Protocol):
    """Messages and payloads to and from the stager. One thread at a time.

    Every method raises `PeerLost` when the stager is known to be lost.

    Attributes:
        has_threads: Payloads move by threads of their own, and not only while this port is asked.
    """

    has_threads: bool

    @property
    def one_machine(self) -> bool:
        """Whether the stager is known to be on this machine: it then mostly reads payloads by itself."""
        ...

    @property
    def crowding(self) -> float:
        """Processes of the job on this machine for each of its cores."""
        ...

    def send(self, message: bytes) -> None:
        """Send a control message; the order is kept."""
        ...

    def send_payload(self, payload: memoryview, slot: int, pieces: Sequence[int]) -> int:
        """Begin to send the bytes of one credit, which are pieces of these sizes; returns a handle.

        `slot` is that of the credit. The bytes must not change until `sent(handle)`.
        """
        ...

    def sent(self, handle: int) -> bool:
        """Whether that payload has been read to its end: its memory may change now."""
        ...

    def poll(self) -> list[bytes]:
        """All control messages that have come. Never waits."""
        ...

    def leave(self, seconds_max: float, *, lost: bool = False) -> None:
        """Say BYE, once, and wait until all that was to be sent has left, at most `seconds_max`.

        With `lost` the stager was silent for too long: it is not waited for.
        """
        ...


class RanksPort(Protocol):
    """Messages among the training ranks."""

    rank: int
    ranks: int

    def send(self, rank: int, message: bytes) -> None:
        """Send to another rank; to a dead one it does nothing."""
        ...

    def poll(self) -> list[tuple[int, bytes]]:
        """All messages that have come, each with its rank. Never waits."""
        ...


class CouncilPort(RanksPort, Protocol):
    """Messages among the ranks for the local tiers, in the order of sending. For the council's thread alone."""

    def lost(self) -> frozenset[int]:
        """Ranks that are known to be dead."""
        ...

    def flush(self, seconds_max: float) -> None:
        """Wait until every message has left."""
        ...


class World(Protocol):
    """The job as its ranks met at start-up.

    Attributes:
        stagers: How many stagers the job has; of several each has a share of every checkpoint.
        stager_advice: How a job like this one gets a stager, for messages: a command and what else is to be done.
    """

    rank: int
    ranks: int
    local_rank: int
    one_machine: bool
    stagers: int
    stager_advice: str

    def port(self) -> StagerPort:
        """The way to the stager, the lead of several. ConfigError: the job has none."""
        ...

    def member(self, index: int, attempt: int, generation: int = 0) -> StagerPort:
        """The way to another of several stagers, which the lead has given this attempt. `generation` above 0: again; as
        `again`, and with several stagers at once.
        """
        ...

    @property
    def again(self) -> Callable[[int], StagerPort] | None:
        """Connects again to a stager that was lost, as this generation of the job's start. Any thread, one at a time.

        It raises `HoldfastError` where the stager cannot be reached or refuses this rank. None: a stager that is lost
        stays so.
        """
        ...

    def peers(self) -> Peers:
        """The way to the other ranks. Main thread, before the first step."""
        ...

    def meeting(self) -> Store | None:
        """A part of the job's store for `torch.distributed`; None: it makes one of its own. PeerLost: it is lost."""
        ...

    def council(self) -> CouncilPort:
        """The way to the other ranks for local tiers, at any time."""
        ...

    def uncaught(self) -> RanksPort:
        """The way to the other ranks for an error that ends this one."""
        ...


def no_stager(world: World) -> ConfigError:
    return ConfigError(
        f"no stager in this job of {world.ranks} trainers; {world.stager_advice}, or set tiers "
        '(HOLDFAST_TIERS="memory,nvme:/mnt/nvme0") and store to keep checkpoints in local tiers'
    )
