"""The job of a training rank without MPI: its ranks meet in a key-value store.

    rank r:  "hello: r, nonce" ──► store ──► rank 0: answers each nonce with the incarnation of this start
    rank r:  "r is here"       ──► store ──► rank 0: all are here; their hosts

A store may outlive the ranks (torchrun's agent serves it), and then still holds the keys of earlier starts of the job.
Every key therefore lies under the incarnation, which rank 0 draws at each start; only a living rank 0 answers a nonce.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from holdfast.config import OWN_PER_NODE, TrainerConfig
from holdfast.errors import ConfigError, PeerLost
from holdfast.image.shares import WRITERS_MAX
from holdfast.net.handshake import JobStart
from holdfast.process import at_exit, set_parent_death_signal
from trainer_side.ranks.c10d_peers import C10dPeers
from trainer_side.ranks.c10d_store import (
    JobStore,
    StoreAnnouncements,
    StoreMailbox,
    append,
    consume,
    open_job_store,
    store_errors,
)
from trainer_side.ranks.deadlines import within
from trainer_side.ranks.peers import LonePeers, Peers
from trainer_side.ranks.world import World

_T = TypeVar("_T")

_INCARNATION_BYTES = 16
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 1e-3, 0.1
_RESEND_SECONDS = 5.0  # without an answer for this time, a rank sends its hello again
_LINGER_SECONDS_MAX = 3.0
_SLACK_SECONDS = 5.0
_LOOPBACK = ("127.", "localhost:", "::1", "[::1]")
_RANKS_SHOWN = 8  # most missing ranks that are named


class C10dWorld(World):
    """The `World` whose ranks met in a store. Construction is collective.

    ConfigError: the environment does not tell which rank this is, or where the ranks meet; or there are too many nodes
    for a stager on each. PeerLost: a rank did not come within `start_seconds_max`.
    """

    def __init__(self, config: TrainerConfig) -> None:
        super().__init__(config)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # End with torchrun's agent: a worker that outlives it would disturb the next start.
            set_parent_death_signal()
        self.rank, self.ranks = _own_rank()
        self.stager_advice = (
            f"start `holdfast stager --store URL --listen HOST:PORT --ranks {self.ranks}` and set "
            "HOLDFAST_STAGER=HOST:PORT; or set HOLDFAST_STAGER=own and HOLDFAST_STORE=URL, and rank 0 starts one"
        )
        seconds_max = config.start_seconds_max

        def open_and_rendezvous() -> tuple[JobStore, _Rendezvous]:
            job = open_job_store(self.rank, self.ranks, seconds_max)
            with store_errors(job.place, "the ranks meeting in it"):
                own_stager = self._starts_stager
                return job, _rendezvous(job, self.rank, self.ranks, seconds_max, own_stager=own_stager)

        try:  # a store whose process is stopped has no deadline of its own
            self._job, rendezvous = within(
                open_and_rendezvous, seconds_max + _SLACK_SECONDS, name="holdfast-meeting"
            )
        except TimeoutError:
            raise PeerLost(
                f"rank {self.rank} waited {seconds_max:g} s for the store of this job, which does not answer; the "
                "process that serves it (torchrun's agent or rank 0) is stopped"
            ) from None
        incarnation, self.launch, hosts = rendezvous
        self.incarnation, self._key_prefix = bytes.fromhex(incarnation), f"holdfast/{incarnation}"
        self.one_machine = len(set(hosts)) == 1
        if config.stager == OWN_PER_NODE:
            self._starting_ranks = [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
            self.stagers = len(self._starting_ranks)
            if self.stagers > WRITERS_MAX:
                raise ConfigError(
                    f"trainer setting stager: own-per-node on {self.stagers} nodes, expected at most {WRITERS_MAX}; "
                    "set it to own, or start stagers and name them"
                )
        of_host = [rank for rank in range(self.ranks) if hosts[rank] == hosts[self.rank]]
        local_rank = os.environ.get("LOCAL_RANK", "")
        self.local_rank = int(local_rank) if local_rank.isdecimal() else of_host.index(self.rank)
        # Connect now: when an error ends this rank it is too late.
        self._uncaught = self._mailbox("uncaught")
        self._peers: Peers | None = LonePeers() if self.ranks == 1 else None
        at_exit(self._disconnect)

    def peers(self) -> Peers:
        if self._peers is None:
            self._peers = C10dPeers(
                self.store("peers"),
                rank=self.rank,
                ranks=self.ranks,
                start_seconds_max=self._config.start_seconds_max,
            )
        return self._peers

    def council_port(self) -> StoreMailbox:
        return self._mailbox("council")

    def uncaught_port(self) -> StoreMailbox:
        return self._uncaught

    def _start(self, generation: int) -> JobStart:
        return JobStart(self.launch, self.incarnation, generation)

    def _announcements(self) -> StoreAnnouncements:
        return StoreAnnouncements(self.store("stager"), self._job.place)

    def store(self, name: str) -> Store:
        """Open a connection to the store, with a key prefix of its own. PeerLost: the store is lost."""
        return PrefixStore(f"{self._key_prefix}/{name}", self._job.connect(self._config.start_seconds_max))

    def torch_store(self) -> Store:
        return self.store("torch.distributed")

    def _mailbox(self, name: str) -> StoreMailbox:
        return StoreMailbox(self.store(name), self._job.place, rank=self.rank, ranks=self.ranks)

    def _disconnect(self) -> None:
        """At exit, say BYE to each stager; if rank 0 serves the store, it waits for the others to leave."""
        super()._disconnect()
        if self._job.outlives_ranks or self.ranks == 1:
            return
        key, deadline = f"{self._key_prefix}/left", time.monotonic() + _LINGER_SECONDS_MAX
        with contextlib.suppress(RuntimeError):  # rank 0, which serves the store, may have left before
            append(self._job.store, key, "x")  # does not wait for an answer
            if self.rank == 0:
                _poll_until(lambda: len(self._job.store.compare_set(key, "", "")) >= self.ranks, deadline)


def _own_rank() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        _reject_srun_tasks()
        return 0, 1
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
        raise ConfigError(
            f"RANK={rank or 'none'}, WORLD_SIZE={ranks or 'none'}: expected a rank and how many there are; start the "
            "job with torchrun, or set both for every rank"
        )
    return int(rank), int(ranks)


def _reject_srun_tasks() -> None:
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdecimal() and int(tasks) > 1:
        raise ConfigError(
            f"srun has started {tasks} tasks, and RANK and WORLD_SIZE say nothing: each would train as if it were "
            "alone; start torchrun as one task of each machine, or set RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_NTASKS, "
            "LOCAL_RANK=$SLURM_LOCALID, MASTER_ADDR and MASTER_PORT in each task"
        )


class _Rendezvous(NamedTuple):
    incarnation: str
    launch: str
    hosts: list[str]  # of each rank


def _launch(place: str, *, own_stager: bool = False) -> str:
    """Name this job: the same when its launcher restarts the ranks, and different for other jobs."""
    if own_stager and not place:
        # The parent alone does not identify the job: a second job of one shell must not use the first one's stager.
        return f"{platform.node()}:{os.getppid()}:{os.getpid()}"
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return run_id
    if job := os.environ.get("SLURM_JOB_ID"):
        return f"{job}.{os.environ.get('SLURM_STEP_ID', '0')}"
    if "TORCHELASTIC_RUN_ID" in os.environ or not place:  # every torchrun without --rdzv-id is "none"
        return f"{platform.node()}:{os.getppid()}"
    return f"{platform.node()}:{place}" if place.startswith(_LOOPBACK) else place


def _rendezvous(
    job: JobStore, rank: int, ranks: int, seconds_max: float, *, own_stager: bool = False
) -> _Rendezvous:
    deadline = time.monotonic() + seconds_max
    store = PrefixStore("holdfast/meeting", job.store)
    if rank == 0:
        launch = _launch(job.place, own_stager=own_stager)
        if job.outlives_ranks:
            # Keep the first start's name; a later start may have another host, or another parent (a wrapper).
            launch = store.compare_set("launch", "", launch).decode()
        return _welcome_ranks(store, launch, ranks, seconds_max, deadline)
    nonce = secrets.token_hex(_INCARNATION_BYTES)

    def read_value(key: str) -> str:
        return str(store.compare_set(key, "", "").decode())

    while True:
        append(store, "hello", f"{nonce}\n")
        until = min(deadline, time.monotonic() + _RESEND_SECONDS)
        if incarnation := _poll_until(lambda: read_value(f"welcome/{nonce}"), until):
            break
        if time.monotonic() >= deadline:
            raise PeerLost(
                f"rank {rank} waited {seconds_max:g} s for rank 0 to meet it; rank 0 did not start or did not come to "
                "holdfast"
            )
    append(store, f"{incarnation}/here", f"{json.dumps([rank, platform.node()])}\n")
    all_here = _poll_until(lambda: read_value(f"{incarnation}/all"), deadline)
    if not all_here:
        raise PeerLost(
            f"rank {rank} waited {seconds_max:g} s for all {ranks} ranks; rank 0's log names those that did not come"
        )
    return _Rendezvous(incarnation, *json.loads(all_here))


def _welcome_ranks(store: Store, launch: str, ranks: int, seconds_max: float, deadline: float) -> _Rendezvous:
    incarnation = secrets.token_hex(_INCARNATION_BYTES)
    hosts = {0: platform.node()}

    def all_here() -> bool:
        for nonce in consume(store, "hello").split():
            store.set(f"welcome/{nonce}", incarnation)
        for line in consume(store, f"{incarnation}/here").splitlines():
            rank, host = json.loads(line)
            hosts[rank] = host
        return len(hosts) >= ranks

    if not _poll_until(all_here, deadline):
        missing = [rank for rank in range(ranks) if rank not in hosts]
        named = ", ".join(map(str, missing[:_RANKS_SHOWN]))
        more = f" and {len(missing) - _RANKS_SHOWN} more" if len(missing) > _RANKS_SHOWN else ""
        raise PeerLost(
            f"rank 0 waited {seconds_max:g} s for all {ranks} ranks; rank {named}{more} did not come to holdfast"
        )
    in_order = [hosts[rank] for rank in range(ranks)]
    store.set(f"{incarnation}/all", json.dumps([launch, in_order]))
    return _Rendezvous(incarnation, launch, in_order)


def _poll_until(check: Callable[[], _T], deadline: float) -> _T:
    """Poll `check` until it finds something or the deadline passes; return its last result."""
    pause_seconds = _PAUSE_SECONDS_MIN
    while not (found := check()) and time.monotonic() < deadline:
        time.sleep(pause_seconds)
        pause_seconds = min(_PAUSE_SECONDS_MAX, pause_seconds * 1.5)
    return found
