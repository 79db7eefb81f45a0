"""Settings of each role (`TrainerConfig`, `StagerConfig`, `FlusherConfig`): read in one place, checked once, frozen.

    arguments  >  HOLDFAST_* environment  >  holdfast.toml  >  defaults

The file is `holdfast.toml` in the working directory, or the file that `HOLDFAST_CONFIG` names. A top-level key
applies to every role that has this setting; a table `[trainer]`, `[stager]` or `[flusher]` applies to that role
alone and overrides the top level:

    store = "s3://bucket/run"
    ring_bytes = "4GiB"
    [stager]
    keep_last = 5

Each name is a field below; its environment variable is `HOLDFAST_` and the name in capitals. Sizes are bytes, or
text with a unit. A wrong value raises a `ConfigError` that names the field, the expected value, the given value, and
where it was set.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, SecretStr, field_validator
from pydantic_core.core_schema import ValidationInfo
from pydantic_settings import NoDecode

from holdfast.config_sources import RoleConfig
from holdfast.image.best_rule import BestMode, BestRule
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import CHUNK_BYTES
from holdfast.image.shares import WHOLE, ShareNumber
from holdfast.setting_values import (
    OWN_PER_NODE,
    OWN_STAGER,
    address_value,
    checkpoint_values,
    listed_values,
    metric_value,
    parse_size,
    share_value,
    stager_values,
    steps_value,
    url_value,
    utf8_value,
)

__all__ = [
    "IN_FLIGHT_MAX",
    "OWN_PER_NODE",
    "OWN_STAGER",
    "RING_BYTES",
    "RING_CHUNKS_MIN",
    "FlusherConfig",
    "StagerConfig",
    "TrainerConfig",
    "default_runtime_dir",
    "parse_size",
]

# Checkpoints in flight at once: those in a rank's staging areas, and one that starts before slower ranks finish theirs.
IN_FLIGHT_MAX = 9
RING_BYTES = 256 << 20  # initial size if `ring_bytes` is not set
RING_CHUNKS_MIN = 8  # below this the ring cannot overlap receiving, writing and freeing
_KEEP_HOURLY, _KEEP_DAILY = 24, 7
_CHUNK_BYTES_MAX = 1 << 30  # one chunk is one MPI message, whose counts are 32 bits
_PAGE_BYTES = 4096
_WATCHED_UNDER = frozenset({"TORCHELASTIC_RUN_ID", "KUBERNETES_SERVICE_HOST"})


def default_runtime_dir() -> Path:
    """Return the default directory of rings: one per user, in shared memory."""
    return Path(f"/dev/shm/holdfast-{os.getuid()}")  # noqa: S108 - made with mode 0700 and its owner checked (ring.py)


_Size = Annotated[int, BeforeValidator(parse_size)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_ChunkBytes = Annotated[_Size, Field(gt=0, le=_CHUNK_BYTES_MAX, multiple_of=_PAGE_BYTES)]
_StoreUrl = Annotated[str, Field(min_length=1), BeforeValidator(utf8_value), AfterValidator(url_value)]
_Count = Annotated[int, Field(ge=0)]
_OnDivergence = Literal["warn", "refuse", "off"]
_Watch = Literal["aws", "gcp", "azure", "auto", "sigterm", "sigusr1"]
_TierSpec = Annotated[str, Field(min_length=1, max_length=4096)]


def default_watch() -> tuple[_Watch, ...]:
    """Return the default of `watch`: SIGTERM under torchrun and in pods, because both send it before they kill.

    An environment variable that is set but empty means that no source is watched.
    """
    if "HOLDFAST_WATCH" in os.environ:
        return ()
    return ("sigterm",) if _WATCHED_UNDER & os.environ.keys() else ()


_HostPort = Annotated[str, BeforeValidator(address_value)]
_OwnOrHostPorts = Annotated[str, BeforeValidator(stager_values)]
_Share = Annotated[ShareNumber, PlainValidator(share_value), NoDecode]
_Every = Annotated[int | Literal["auto"], BeforeValidator(steps_value)]


# The field shadows pydantic's deprecated method `copy`, which holdfast does not call.
warnings.filterwarnings("ignore", message='Field name "copy" in "TrainerConfig" shadows')


class TrainerConfig(RoleConfig):
    """Settings of a training rank (`trainer_side`).

    Attributes:
        start_seconds_max: Seconds to wait for the stager when the job starts.
        stager_seconds_max: Seconds without a sign of life after which the stager counts as lost.
        restore_seconds_max: Seconds that reading one checkpoint may take, and as many again for its exchange among the
            ranks. A tier that takes a tenth of this for one request counts as hung, and the next source is tried.
        close_seconds_max: Seconds that `close()` waits for checkpoints in flight to become durable.
        in_flight_max: Largest number of checkpoints that a rank sends at once, besides one that is sent but not staged
            yet. More than 1 absorbs short pauses of the store, and does not speed up a slow one. Each takes a staging
            area as large as this rank's slice, allocated on first use; with a device, all are allocated at the first
            save, in the background.
        host_bytes_max: Largest amount of host memory for the staging areas of one rank. As many areas as fit are used,
            at most `in_flight_max`. None: only `in_flight_max` limits the areas.
        device_bytes_max: Largest amount of device memory for a copy of this rank's slice; the copy moves to host memory
            during training, and updates do not wait for it. 0: no copy on the device. None: from the second save on,
            the memory that is free at torch's peak use for training, less a tenth of the device's memory.
        on_full: Behaviour of `save()` while every staging area is in use: `skip` skips the step at once; `wait` waits
            until the oldest step in flight is staged.
        full_seconds_max: With `on_full="wait"`: seconds to wait for a staging area before the step is declined. Must be
            the same on every rank.
        copy: When this rank's state is copied. `auto`: after `save()` has returned, if holdfast can show that updates
            wait for the copy and that nothing else changes the state; otherwise inside `save()`. `inside`: always
            inside `save()`; correct for any training code, but training pauses for the whole copy.
        copy_inside_ms_max: With `copy="auto"`: a slice whose copy takes at most this many milliseconds, as this rank
            has measured, is copied inside `save()`. 0: no slice is copied there for that reason.
        copy_seconds_max: Seconds that `optimizer.step()` waits for this rank's own copy of the state; then the
            checkpoint of that step is dropped.
        on_divergence: With `off` the ranks do not fingerprint their replicas. With `warn` or `refuse` they do, and the
            stager's setting of this name decides what happens when replicas differ. Without a stager this one decides:
            `warn` logs it and keeps the step, `refuse` fails the step. Must then be the same on every rank.
        on_not_durable: Behaviour of `close()` and of the end of the `with` block if the newest step to be saved is not
            durable (the stager was lost, the store is unavailable, the step was declined): `fail` raises `NotDurable`,
            so that the job does not exit with 0; `warn` logs it.
        on_stager_lost: Behaviour of a rank that has lost its stager. `train`: it continues training, and tries to
            reconnect to a stager at the same address (not under mpirun, where the stager is a process of the job).
            `own`: the same, and if no stager answers there, rank 0 starts one on its machine, as with `stager="own"`;
            needs `store`. `end`: the next `step()` or `save()` raises `PeerLost`, so that the launcher restarts the
            job.
        own_after_seconds: With `on_stager_lost="own"`: seconds without an answer after which rank 0 starts a stager.
        on_unproven: Behaviour of the first `step()` after a resume if it differs from the same step of the run before
            (in data, random numbers, learning rate or loss). `warn`: a log line names the difference. `stop`: every
            rank raises `ResumeDiffers`. A resume without a record to compare with never ends the training.
        tiers: Local tiers in which this rank keeps its slices, with or without a stager, nearest first: `memory`,
            `nvme:/mnt/nvme0`. Separated by commas in the environment. Must be the same on every rank. Empty: no tier.
        tier_slots: Number of checkpoint slots in each tier, at least 2: one for a complete step, the others for steps
            in flight. None: one more than `in_flight_max` in memory, and measured on a device.
        tier_writers: Number of threads that write to a tier. None: up to 6 in memory, at most half of the rank's
            cores; measured on a device.
        tier_seconds_max: Seconds to wait for the slowest rank's slice after the first rank has sealed its own; then the
            step counts as incomplete in that tier.
        store: URL of the run. Needed only if the job has no stager, or if rank 0 starts the stager.
        create: In a job without a stager, or with one of its own: also create the directories above the run's own.
            Without it a path whose parent directory does not exist is refused, because its file system may not be
            mounted.
        chunk_bytes: Size of a chunk, a multiple of 4096. Used only if the job has no stager.
        watch: Sources of preemption notices for this machine: `aws`, `gcp`, `azure`, `auto` (finds out once which
            metadata server answers), and the signals `sigterm` and `sigusr1` to this process. Separated by commas in
            the environment. Empty: none. Default: `sigterm` under torchrun and in a pod of Kubernetes, none elsewhere.
        watch_seconds: Seconds between two polls of the metadata server, by the first rank of each machine.
        watch_grace_seconds: Seconds from a watched signal until the process is expected to be killed.
        every: Number of training steps from one checkpoint of `Checkpointer.step()` to the next, unless the script sets
            it. 0: only `save()` takes checkpoints. `auto`: chosen from the cost of checkpoints (docs/interval.md). Must
            be the same on every rank.
        overhead_max: With `every="auto"`: largest share of training time that checkpoints may cost; 0.03 means 3 %.
        every_seconds_max: With `every="auto"`: longest time between two checkpoints in seconds, regardless of their
            cost.
        mtbf_hours: With `every="auto"`: mean hours between two interruptions. Within `overhead_max`, the interval with
            the smallest expected loss is chosen. None: estimated from the run's own failures.
        dollars_per_hour: With `every="auto"`: price of all machines in US dollars per hour, to report the cost of an
            interruption. None: no cost is reported.
        restore_without_store: If the store does not answer, restore the newest step of the local tiers, although the
            store may hold a newer one.
        restore_set_aside: Checkpoints that restore skips, each as STEP-aATTEMPT such as 1200-a3, together with all that
            the same attempt saved later. Separated by commas in the environment. Must be the same on every rank. If
            the job crashes repeatedly after restoring a checkpoint, `holdfast run` adds that checkpoint to the
            environment variable. Empty: none.
        stager: HOST:PORT of the stager, in a job that torchrun or another launcher than mpirun has started. Several
            stagers, each with a share of every checkpoint, are separated by commas, in the order of their shares
            (docs/scaling.md). `own`: rank 0 starts a stager on its machine, which ends with the job (docs/torchrun.md).
            `own-per-node`: the first rank of each node starts one, for a share; not under mpirun. In holdfast.toml, set
            it in the table [trainer]. Must be the same on every rank. None: the job has no stager; under mpirun the
            stager is a process of the job.
        key: The key of that stager, at least 32 characters. No message shows it.
        key_file: A file that contains only that key, instead of `key`.
        tls_ca: File with the certificates to trust, as PEM, for a stager that was started with `tls_cert`: either its
            own certificate or that of the authority that signed it. The certificate must be for the host in `stager`.
            None: connections have no TLS.
        connections: Number of TCP connections from each rank to that stager, 1 to 16.
        reconnect_seconds_max: Seconds that a rank tries to reconnect to that stager after a connection was cut; then
            the stager counts as lost.
    """

    role: ClassVar[str] = "trainer"

    start_seconds_max: _Seconds = 300.0
    stager_seconds_max: _Seconds = 30.0
    restore_seconds_max: _Seconds = 600.0
    close_seconds_max: _Seconds = 600.0
    in_flight_max: Annotated[int, Field(ge=1, le=IN_FLIGHT_MAX - 1)] = 1
    host_bytes_max: Annotated[_Size, Field(gt=0)] | None = None
    device_bytes_max: _Size | None = None
    on_full: Literal["skip", "wait"] = "skip"
    full_seconds_max: _Seconds = 300.0
    copy: Literal["auto", "inside"] = "auto"  # type: ignore[assignment]
    copy_inside_ms_max: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    copy_seconds_max: _Seconds = 300.0
    on_divergence: _OnDivergence = "warn"
    on_not_durable: Literal["fail", "warn"] = "fail"
    on_stager_lost: Literal["train", "end", "own"] = "train"
    own_after_seconds: _Seconds = 30.0
    on_unproven: Literal["warn", "stop"] = "warn"
    tiers: Annotated[tuple[_TierSpec, ...], BeforeValidator(listed_values), NoDecode] = ()
    tier_slots: Annotated[int, Field(ge=2, le=64)] | None = None
    tier_writers: Annotated[int, Field(ge=1, le=64)] | None = None
    tier_seconds_max: _Seconds = 300.0
    store: _StoreUrl | None = None
    create: bool = False
    chunk_bytes: _ChunkBytes = CHUNK_BYTES
    watch: Annotated[tuple[_Watch, ...], BeforeValidator(listed_values), NoDecode] = Field(
        default_factory=default_watch
    )
    watch_seconds: _Seconds = 5.0
    watch_grace_seconds: _Seconds = 30.0
    every: _Every = 0
    overhead_max: Annotated[float, Field(gt=0, le=1)] = 0.03
    every_seconds_max: _Seconds = 3600.0
    mtbf_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    dollars_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    restore_without_store: bool = False
    restore_set_aside: Annotated[tuple[CheckpointId, ...], BeforeValidator(checkpoint_values), NoDecode] = ()
    stager: _OwnOrHostPorts | None = None
    key: SecretStr | None = None
    key_file: Path | None = None
    tls_ca: Path | None = None
    connections: Annotated[int, Field(ge=1, le=16)] = 2
    reconnect_seconds_max: _Seconds = 10.0

    @field_validator("stager", mode="after")
    @classmethod
    def _check_stager(cls, value: str | None, info: ValidationInfo) -> str | None:
        several = value == OWN_PER_NODE or (value is not None and "," in value)
        if several and info.data.get("on_stager_lost") == OWN_STAGER:
            raise ValueError(
                "one address where on_stager_lost is own: a stager of the job's own replaces one stager, not several"
            )
        return value

    @property
    def stagers(self) -> tuple[str, ...]:
        """The addresses in `stager`, in the order of the shares; empty if it is not set."""
        return () if self.stager is None else tuple(self.stager.split(","))

    @field_validator("tiers", mode="after")
    @classmethod
    def _check_tiers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("each tier only once")
        if "store" in value:
            raise ValueError(
                "local tiers; ranks no longer write to the store themselves: instead of the tier store set "
                "HOLDFAST_STAGER=own, and rank 0 starts a stager that does"
            )
        return value


class _RingConfig(RoleConfig):
    """Settings that stager and flusher share; the stager passes them to the flusher that it starts.

    Attributes:
        store: URL of the run: a path, s3://bucket/run, or another URL that fsspec knows.
        create: Also create the directories above the run's own. Without it a path whose parent directory does not exist
            is refused, because its file system may not be mounted.
        chunk_bytes: Size of the chunks in which a checkpoint is sent and written, such as 16MiB; a multiple of 4096.
            None: 16MiB; and 64MiB in a new ring of a run whose newest checkpoint has 100 GB or more.
        ring_bytes: Shared memory for checkpoints on their way to the store, such as 4GiB; at least 8 chunks. A larger
            checkpoint streams through it. None: 256 MiB at first; once the size of a checkpoint is known, room for two,
            but at most half of the memory that is free then.
        keep_last: Number of the newest good checkpoints to keep in the store; 0 keeps all.
        keep_every: Also keep every checkpoint whose step is a multiple of this number; 0: none.
        keep_hourly: Also keep the first checkpoint of each hour, for this many hours that have one. None: 24, or 0 if
            `keep_last` is set.
        keep_daily: Also keep the first checkpoint of each day, for this many days that have one. None: 7, or 0 if
            `keep_last` is set.
        keep_best: Also keep this many of the best checkpoints by `best_metric`; 0: none. Needs `best_metric` and
            `best_mode`.
        best_metric: Name of the metric by which checkpoints are ranked, as the script passes it to `step()` or
            `save()`, such as `val_loss`. None: checkpoints are not ranked.
        best_mode: The best value of `best_metric`: `min` is the lowest, `max` the highest. None: not set.
        on_nonfinite: Treatment of a checkpoint in which the read-back finds numbers that are not finite (NaN or
            infinite): `warn` logs it and marks the checkpoint verified; `refuse` marks it bad, and restore uses the
            previous one.
        verify: Read every checkpoint back after it was published, and mark it verified or bad.
        reuse: Write a new checkpoint over the file of one that is no longer kept and not open (ext4 and XFS only). Turn
            it off if other machines read these files over NFS from this one.
        linger: Keep the flusher running after training has ended, for the next job.
        writers: Number of parts that the flusher writes to the store at once, 1 to 128. None: 2 to a directory; to S3,
            the number measured as fastest.
        runtime_dir: Directory of the ring, its journal and its socket; it should be in memory (tmpfs).
        niceness: Nice value of stager and flusher, 0 to 19; with 10 they yield to training ranks on the same machine,
            which must leave them some CPU time (docs/design/001-flusher-owns-the-ring.md).
        share: The share of each checkpoint that this stager receives and its flusher writes, as K/S: the K-th of S
            stagers of the run, from 1. The first one leads. 1/1: the run has no other stager. Leave it unset under
            mpirun, where the K-th stager of the job has the K-th share.
        metrics_port: Port on which the stager serves /metrics to Prometheus; the flusher takes the next port, and the
            next of several stagers under mpirun the one after that. None: neither serves it.
        metrics_address: Address on which stager and flusher serve /metrics; 127.0.0.1 can be reached only from this
            machine.
    """

    store: _StoreUrl
    create: bool = False
    chunk_bytes: _ChunkBytes | None = None
    ring_bytes: _Size | None = None
    keep_last: _Count = 3
    keep_every: _Count = 0
    keep_hourly: _Count | None = None
    keep_daily: _Count | None = None
    best_metric: Annotated[str, AfterValidator(metric_value)] | None = None
    best_mode: BestMode | None = None
    keep_best: _Count = 0
    verify: bool = True
    on_nonfinite: Literal["warn", "refuse"] = "warn"
    reuse: bool = True
    linger: bool = False
    writers: Annotated[int, Field(ge=1, le=128)] | None = None
    runtime_dir: Path = Field(default_factory=default_runtime_dir)
    niceness: Annotated[int, Field(ge=0, le=19)] = 0
    share: _Share = WHOLE
    metrics_port: Annotated[int, Field(ge=1, lt=65535)] | None = None
    metrics_address: Annotated[str, Field(min_length=1)] = "127.0.0.1"

    @field_validator("ring_bytes", mode="after")
    @classmethod
    def _check_ring_bytes(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None or "chunk_bytes" not in info.data:
            return value
        chunk_bytes = info.data["chunk_bytes"] or CHUNK_BYTES
        if value < RING_CHUNKS_MIN * chunk_bytes:
            least = RING_CHUNKS_MIN * chunk_bytes
            raise ValueError(
                f"at least {least} bytes, which is {RING_CHUNKS_MIN} chunks of {chunk_bytes} bytes"
            )
        return value

    @field_validator("best_mode", mode="after")
    @classmethod
    def _check_best_mode(cls, value: BestMode | None, info: ValidationInfo) -> BestMode | None:
        metric = info.data.get("best_metric")
        if value is None and metric is not None:
            raise ValueError(f"min or max: whether the lowest or the highest {metric} is best")
        return value

    @field_validator("keep_best", mode="after")
    @classmethod
    def _check_keep_best(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("best_metric", "") is None:
            raise ValueError(
                "0 unless best_metric and best_mode are set: they define which checkpoints are best"
            )
        return value

    @field_validator("on_nonfinite", mode="after")
    @classmethod
    def _check_on_nonfinite(cls, value: str, info: ValidationInfo) -> str:
        if value == "refuse" and info.data.get("verify") is False:
            raise ValueError("warn if verify is off: numbers are counted when a checkpoint is read back")
        return value

    @property
    def hourly_kept(self) -> int:
        """`keep_hourly` or its default, which is 0 if `keep_last` is set: the user has then planned the space."""
        return self._count_or_default(self.keep_hourly, _KEEP_HOURLY)

    @property
    def daily_kept(self) -> int:
        """`keep_daily` or its default, like `hourly_kept`."""
        return self._count_or_default(self.keep_daily, _KEEP_DAILY)

    @property
    def best_rule(self) -> BestRule | None:
        """The rule that ranks checkpoints; None unless metric and mode are set."""
        if self.best_metric is None or self.best_mode is None:
            return None
        return BestRule(metric=self.best_metric, mode=self.best_mode)

    def _count_or_default(self, count: int | None, default: int) -> int:
        if count is not None:
            return count
        return 0 if "keep_last" in self.model_fields_set else default

    def ring_chunks(self, chunk_bytes: int) -> int:
        """Return the number of whole chunks of this size that fit into a new ring."""
        if self.ring_bytes is not None:
            return self.ring_bytes // chunk_bytes
        return max(RING_CHUNKS_MIN, RING_BYTES // chunk_bytes)


class StagerConfig(_RingConfig):
    """Settings of the stager.

    Attributes:
        offer_seconds_max: Seconds to wait for the slowest rank to offer its part of a step; then the step is aborted.
        chunk_seconds_max: Seconds that a rank may take to send a chunk after the stager has granted it.
        rank_seconds_max: Seconds without a sign of life after which a rank counts as silent: the step that needs it is
            aborted, and later steps are declined until the rank responds again.
        start_seconds_max: Seconds to wait for all trainers, and for the flusher, when the job starts.
        rebalance_factor: Factor by which checkpoints are more frequent after a rebalance recommendation, which warns
            that a rank's machine may be taken away; 1: unchanged.
        rebalance_seconds: Seconds for which checkpoints are more frequent after a rebalance recommendation.
        on_divergence: Reaction when replicas that should be equal on all ranks differ: `warn` logs it and stages the
            step, `refuse` fails the step, `off` does not compare them.
        listen: Address, as HOST:PORT, at which a stager outside an MPI job waits for training ranks; with port 0 the
            system chooses one. An address that other machines reach needs a key. None: the stager is a process of an
            MPI job.
        ranks: Number of training ranks that a job must have to join a stager that listens. None: as many as the first
            rank of the job says.
        key: Secret, of at least 32 characters, with which training ranks and a stager that listens authenticate each
            other. Give it in HOLDFAST_KEY, or use `key_file`.
        key_file: File that contains only the key; other users must not be able to read it.
        tls_cert: File with the certificate of a stager that listens, as PEM, followed by any intermediate certificates
            up to the authority that ranks trust (their setting `tls_ca`). Connections then have TLS 1.3; a renewed file
            is read again. None: connections have no TLS.
        tls_key: File with the private key of `tls_cert`, as PEM, without a password.
        reconnect_seconds_max: Seconds that a rank whose connection to a stager that listens was cut may take to
            reconnect; then it counts as lost.
        idle_seconds_max: Seconds that a stager that listens waits for a job; then it ends. None: no limit, but 60
            seconds if a job started the stager itself and has died.
    """

    role: ClassVar[str] = "stager"

    offer_seconds_max: _Seconds = 60.0
    chunk_seconds_max: _Seconds = 120.0
    rank_seconds_max: _Seconds = 30.0
    start_seconds_max: _Seconds = 300.0
    rebalance_factor: Annotated[int, Field(ge=1, le=1000)] = 4
    rebalance_seconds: _Seconds = 1800.0
    on_divergence: _OnDivergence = "warn"
    listen: _HostPort | None = None
    ranks: Annotated[int, Field(ge=1)] | None = None
    key: SecretStr | None = None
    key_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    reconnect_seconds_max: _Seconds = 10.0
    idle_seconds_max: _Seconds | None = None

    @field_validator("listen", mode="after")
    @classmethod
    def _check_listen(cls, value: str | None, info: ValidationInfo) -> str | None:
        share = info.data.get("share", WHOLE)
        if value is None and share != WHOLE:
            raise ValueError(
                f"HOST:PORT if share is {share}: under mpirun a stager's share follows from its place in the job, so "
                "leave the setting share out"
            )
        return value


class FlusherConfig(_RingConfig):
    """Settings of the flusher.

    Attributes:
        grace_seconds: Seconds that a flusher with nothing left to write waits for a lost stager to attach again; then
            it ends.
        held_seconds_max: Seconds that a flusher without a stager retries a store that refuses all writes; then it ends
            with the store's error and leaves the ring for the next flusher.
        heartbeat_seconds: Seconds between two renewals of the claim on the run; other hosts consider the flusher dead
            after two missed ones.
    """

    role: ClassVar[str] = "flusher"

    grace_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    held_seconds_max: _Seconds = 3600.0
    heartbeat_seconds: _Seconds = 5.0
