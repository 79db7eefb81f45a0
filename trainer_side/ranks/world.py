"""The job as its ranks met at start-up: the connections of a rank to the stager, and to the other ranks.

    World ── StagerPort   control messages and payloads to the stager (ports.py)
        ├─── CouncilPort  messages among the ranks, for the local tiers
        ├─── RanksPort    messages among the ranks, for an uncaught error
        └─── Peers        bytes among the ranks, for restore (peers.py)

The launcher decides how the ranks meet and reach each other (joined.py): `MpiWorld` under mpirun, `C10dWorld`
elsewhere. The stagers that the job starts or that a setting names are the same for both, and are here.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.config import OWN_PER_NODE, OWN_STAGER, TrainerConfig
from holdfast.errors import ConfigError
from holdfast.image.shares import ShareNumber
from holdfast.net.handshake import JobStart
from holdfast.net.key import read_key
from trainer_side.ranks.peers import Peers
from trainer_side.ranks.ports import CouncilPort, RanksPort, StagerPort

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from trainer_side.ranks.c10d_store import StoreAnnouncements
    from trainer_side.ranks.started_stager import StartedStager

_DISCONNECT_SECONDS_MAX = 5.0


class World(abc.ABC):
    """The job as its ranks met at start-up. Made once per process, by `joined.join_world`."""

    rank: int
    ranks: int
    local_rank: int  # number of this rank on its machine
    one_machine: bool  # whether all ranks are on one machine
    stager_advice: str  # how to give a job like this one a stager, for error messages

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self.stagers = len(config.stagers)  # of the job; several have a share of every checkpoint each
        self._starts_stager = not {OWN_STAGER, OWN_PER_NODE}.isdisjoint(
            (config.stager, config.on_stager_lost)
        )
        self._starting_ranks = [0]  # ranks that start the job's own stagers: by node, from `port` on by share
        self._ports: dict[int, StagerPort] = {}  # by the stager's share
        self._own: dict[int, StartedStager] = {}  # by the stager's share

    def port(self) -> StagerPort:
        """Connect to the stager, the lead of several. Collective if the job starts its own stager.

        ConfigError: the job has no stager, or the key cannot be read. PeerLost: the stager was not reached in
        `start_seconds_max`. HoldfastError: the own stager could not be started.
        """
        if not self.stagers:
            raise ConfigError(
                f"no stager in this job of {self.ranks} trainers; {self.stager_advice}, or set tiers "
                '(HOLDFAST_TIERS="memory,nvme:/mnt/nvme0") and store to keep checkpoints in local tiers'
            )
        if not self._ports and self.stagers > 1 and self._starts_stager:
            # Here and not above: a job with a stager under mpirun needs neither sockets nor TLS.
            from trainer_side.ranks.started_stager import living_share, starting_ranks

            mine = living_share(self._config).encode()
            living = [
                self.peers().broadcast(mine if root == self.rank else None, root).decode()
                for root in self._starting_ranks
            ]
            self._starting_ranks = starting_ranks(self._starting_ranks, living)
        return self.member(0, 0)

    def member(self, index: int, attempt: int, generation: int = 0) -> StagerPort:
        """Connect to stager `index` of several, with the attempt that the lead has chosen; collective the first time if
        the stagers are the job's own. `generation` above 0: as `reconnect`, also to the lead itself; different stagers
        may be reconnected at the same time.
        """
        if not generation and index in self._ports:
            return self._ports[index]
        if not self._starts_stager:
            port = self._connect(index, attempt, generation)
        elif index in self._own:
            port = self._own[index].reconnect(generation, attempt)
        else:
            port = self._start_stager(index, attempt, generation)
        self._ports[index] = port
        return port

    def _connect(self, index: int, lead_attempt: int, generation: int) -> StagerPort:
        from trainer_side.ranks.tcp_stager_port import StagerTarget, connect_to_stager

        config = self._config
        key = read_key(None if config.key is None else config.key.get_secret_value(), config.key_file)
        return connect_to_stager(
            config,
            StagerTarget(config.stagers[index], key or None, lead_attempt),
            rank=self.rank,
            ranks=self.ranks,
            start=self._start(generation),
            seconds_max=config.reconnect_seconds_max if generation else config.start_seconds_max,
        )

    def _start_stager(self, index: int, lead_attempt: int, generation: int) -> StagerPort:
        from trainer_side.ranks.started_stager import OwnShare, StartedStager

        started = self._own[index] = StartedStager(
            self._config,
            self.peers(),
            self._start(generation),
            one_machine=self.one_machine,
            announcements=self._announcements() if index == 0 else None,
            own=OwnShare(self._starting_ranks[index], ShareNumber(index, self.stagers), lead_attempt),
        )
        return started.port

    @property
    def reconnect(self) -> Callable[[int], StagerPort] | None:
        """A call that reconnects to a lost stager, as a new generation of the job's start. Any thread, one at a time.

        The call raises `HoldfastError` if the stager cannot be reached or refuses this rank. None: a lost stager stays
        lost.
        """
        return lambda generation: self.member(0, 0, generation)

    def _disconnect(self) -> None:
        """Say BYE at exit: a rank that never made a link must do so, too, or the stagers wait for it."""
        for port in self._ports.values():
            port.disconnect(_DISCONNECT_SECONDS_MAX)

    @abc.abstractmethod
    def peers(self) -> Peers:
        """Connect to the other ranks for restore. Main thread, before the first step. Collective the first time.

        PeerLost: a rank did not connect in `start_seconds_max`.
        """

    @abc.abstractmethod
    def council_port(self) -> CouncilPort:
        """Connect to the other ranks for local tiers. At any time."""

    @abc.abstractmethod
    def uncaught_port(self) -> RanksPort:
        """The port to the other ranks for an error that ends this one."""

    @abc.abstractmethod
    def _start(self, generation: int) -> JobStart:
        """Identify this start of the job to a stager over TCP. Collective under mpirun."""

    def torch_store(self) -> Store | None:
        """A part of the job's store for `torch.distributed`; None if there is no such store. PeerLost: it is lost."""
        return None

    def _announcements(self) -> StoreAnnouncements | None:
        """A channel on which rank 0 announces another stager; None: the own stager keeps its address."""
        return None
