"""The interfaces of a training rank to its stager and to the other ranks, for all code outside this package.

    World ── StagerPort   control messages and payloads to the stager
        ├─── CouncilPort  messages among the ranks, for the local tiers
        ├─── RanksPort    messages among the ranks, for an uncaught error
        └─── Peers        bytes among the ranks, for restore (peers.py)

The launcher decides which class implements `World` (joined.py): `MpiWorld` under mpirun, `C10dWorld` elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from holdfast.errors import ConfigError, PeerLost
from trainer_side.ranks.peers import Peers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class GenerationOver(PeerLost):
    """The stager refuses this generation of the job's start; the ranks may return as the next one."""


class StartReplaced(PeerLost):
    """The launcher has restarted the job, so no stager serves this older start any more."""


class StagerPort(Protocol):
    """Messages and payloads to and from the stager. One thread at a time.

    Every method raises `PeerLost` when the stager is known to be lost.

    Attributes:
        has_threads: Payloads move in threads of their own; otherwise only while this port is polled.
    """

    has_threads: bool

    @property
    def one_machine(self) -> bool:
        """Whether the stager is known to be on this machine; it then mostly reads payloads by itself."""
        ...

    @property
    def processes_per_core(self) -> float:
        """Processes of the job per core of this machine; 0 if unknown."""
        ...

    def send(self, message: bytes) -> None:
        """Send a control message. Messages arrive in the order of sending."""
        ...

    def send_payload(self, payload: memoryview, slot: int, pieces: Sequence[int]) -> int:
        """Begin to send the payload of the credit for `slot`; return a handle.

        `pieces` are the sizes of its parts. The bytes must not change until `is_sent(handle)`.
        """
        ...

    def is_sent(self, handle: int) -> bool:
        """Whether the payload was read to its end, so that its memory may change."""
        ...

    def poll(self) -> list[bytes]:
        """Return the control messages that have arrived. Never waits."""
        ...

    def disconnect(self, seconds_max: float, *, lost: bool = False) -> None:
        """Send BYE, once, and wait until all queued messages and payloads were sent, at most `seconds_max`.

        With `lost` the stager has timed out, and the call does not wait for it.
        """
        ...


class RanksPort(Protocol):
    """Messages among the training ranks."""

    rank: int
    ranks: int

    def send(self, rank: int, message: bytes) -> None:
        """Send to another rank; ignored for a dead one."""
        ...

    def poll(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, each with its sender. Never waits."""
        ...


class CouncilPort(RanksPort, Protocol):
    """Messages among the ranks for the local tiers, in the order of sending. Only for the council's thread."""

    def lost_ranks(self) -> frozenset[int]:
        """Ranks that are known to be dead."""
        ...

    def flush(self, seconds_max: float) -> None:
        """Wait until every message was sent, at most `seconds_max`."""
        ...


class World(Protocol):
    """The job as its ranks met at start-up.

    Attributes:
        stagers: How many stagers the job has; several have a share of every checkpoint each.
        stager_advice: How to give a job like this one a stager, for error messages.
    """

    rank: int
    ranks: int
    local_rank: int
    one_machine: bool
    stagers: int
    stager_advice: str

    def port(self) -> StagerPort:
        """Connect to the stager, the lead of several. ConfigError: the job has no stager."""
        ...

    def member(self, index: int, attempt: int, generation: int = 0) -> StagerPort:
        """Connect to stager `index` of several, with the attempt that the lead has chosen. `generation` above 0:
        as `reconnect`, also to the lead itself; different stagers may be reconnected at the same time.
        """
        ...

    @property
    def reconnect(self) -> Callable[[int], StagerPort] | None:
        """A call that reconnects to a lost stager, as a new generation of the job's start. Any thread, one at a time.

        The call raises `HoldfastError` if the stager cannot be reached or refuses this rank. None: a lost stager stays
        lost.
        """
        ...

    def peers(self) -> Peers:
        """Connect to the other ranks for restore. Main thread, before the first step."""
        ...

    def torch_store(self) -> Store | None:
        """A part of the job's store for `torch.distributed`; None if there is no such store. PeerLost: it is lost."""
        ...

    def council_port(self) -> CouncilPort:
        """Connect to the other ranks for local tiers. At any time."""
        ...

    def uncaught_port(self) -> RanksPort:
        """The port to the other ranks for an error that ends this one."""
        ...


def no_stager_error(world: World) -> ConfigError:
    return ConfigError(
        f"no stager in this job of {world.ranks} trainers; {world.stager_advice}, or set tiers "
        '(HOLDFAST_TIERS="memory,nvme:/mnt/nvme0") and store to keep checkpoints in local tiers'
    )
