"""One writer per run: the fencing epoch, kept as small files in the store.

    RUN/.holdfast/writer-000007.json      {attempt, write_id, host, …, pid, heartbeat_seconds, beat, released}

    acquire: read the claims ─► newest one alive? ── yes ─► FencedError, naming its host and pid
                                   │ no
                                   ▼
          create writer-<highest + 1> ── someone was faster ─► read again
                                   │ ours
                                   ▼
          beat() now and then · check() before every publish · release() at the end

The number of the claim is the *attempt*: it only grows, and the highest one owns the run. No message is needed when a
writer loses the lease: one that finds a higher attempt than its own stops (`FencedError`), however long it slept.

A claim also counts the failures of all attempts before it (docs/format.md, section 4): each once, because nobody reads
an older claim's sums.

Whether the newest claim is alive needs no clock shared between hosts. In the same place (host, boot, pid namespace) its
process is looked up, with its start time, because pids are reused. Elsewhere its `beat` is watched: a live writer
changes it within two heartbeats. A claim file that cannot be read counts as dead, with a warning.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.checkpoints.branches import rewind_attempt
from holdfast.checkpoints.identity import Identity
from holdfast.checkpoints.manifest_order import manifests_in, newest_first, old_slices
from holdfast.errors import DamageError, FencedError, StoreError, StoreMissing
from holdfast.image.manifest import Manifest
from holdfast.sealed import seal, unseal
from holdfast.store.base import ObjectInfo, Store
from holdfast.store.retrying import Retrying
from holdfast.wire.failure_count import FailureCount

_PUBLISHED = re.compile(r"-a(\d{3,10})[.-]")  # in names of files, manifests and slices
# old claims are removed, so the first that is left may have any number up to this
_ATTEMPTS_SKIPPED_MAX = 1_000_000
_CLAIM_BYTES_MAX = 1 << 16
_NAME = re.compile(r"\.holdfast/writer-(\d{6,18})\.json")
_CRC_FIELD = "claim_crc32"
_KEPT_CLAIMS = 3  # people read them after a failure; more would only slow listings
_ACQUIRE_ROUNDS_MAX = 10  # each lost round means that someone else won it, and is then found alive or dead
_HEARTBEAT_SECONDS_MAX = 60.0  # a claim from outside must not make us wait for hours
_LOOKS_PER_HEARTBEAT = 4

_Text = Annotated[str, Field(max_length=1024)]
_Whole = Annotated[int, Field(ge=0, lt=2**62)]
_Seconds = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]

_log = logging.getLogger("holdfast.claim")


class Work(StrEnum):
    """State of the work of a claim's attempt; see the module."""

    NONE = "none"
    RUNNING = "running"
    LEFT = "left"
    LOST = "lost"


class _LeaseRecord(BaseModel):
    """The content of a claim file."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format: Literal["holdfast-claim/2"] = "holdfast-claim/2"
    attempt: Annotated[int, Field(ge=1, lt=2**62)]
    write_id: _Text
    host: _Text
    boot_id: _Text
    pid_namespace: _Text
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    started: _Whole
    heartbeat_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    beat: _Whole
    released: bool = False
    named: bool = False  # every manifest of the run has its attempt in its name, or is of attempt 1
    failures: _Whole = 0  # of the attempts before this one
    seen_seconds: _Seconds = 0.0  # of those attempts
    work: Work = Work.NONE
    work_seconds: _Seconds = 0.0  # of this attempt

    @property
    def prior_failures(self) -> FailureCount:
        return FailureCount(self.failures, self.seen_seconds)

    def failures_with_own(self, *, is_over: bool) -> FailureCount:
        """Return the sums including this attempt. `is_over`: its writer is gone, so a running job counts as lost."""
        if self.work is Work.NONE:
            return self.prior_failures
        failed = self.work is Work.LOST or (is_over and self.work is Work.RUNNING)
        return self.prior_failures.with_attempt(self.work_seconds, failed=failed)

    @property
    def identity(self) -> Identity:
        return Identity(self.host, self.boot_id, self.pid_namespace, self.pid, self.started)

    def to_bytes(self) -> bytes:
        return seal(self.model_dump_json().encode(), _CRC_FIELD)


class LeasedRun(NamedTuple):
    """A run that this process holds the lease on."""

    store: Store  # checks the lease in each attempt of a visible change
    attempt: int
    check: Callable[[], None]  # checks the lease, and beats; to be called often


class Lease:
    """The right to write to a run, until a higher attempt appears. Made by `acquire`. Any thread. `unanswered`:
    `write_id` of higher claims that this writer requested without an answer; `check` removes them.
    """

    def __init__(
        self,
        store: Store,
        record: _LeaseRecord,
        *,
        previous: _LeaseRecord | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.unanswered: set[str] = set()
        self._clock, self._previous = clock, previous
        self._failures = record.failures
        # Set without the lock, which a beat may hold while the store does not answer.
        self._work, self._work_since, self._work_seconds = Work.NONE, 0.0, 0.0
        self._store = store
        self._unretried_store = store.inner if isinstance(store, Retrying) else store  # without retries
        self._record = record
        self._lock = threading.Lock()  # a beat must not undo a release

    @classmethod
    def acquire(
        cls,
        store: Store,
        *,
        heartbeat_seconds: float = 5.0,
        sleep: Callable[[float], None] = time.sleep,
        takeover: bool = False,
        identity: Identity | None = None,
        claimed_ids: set[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Lease:
        """Claim the run with the next attempt. `takeover`: fence the last writer without checking whether it is alive.
        `identity`: None: this process. `claimed_ids` collects the `write_id` of each claim requested: one may exist
        without an answer.

        Blocks for up to two heartbeats when the last writer was on another host and did not release its claim. Raises
        `FencedError`: another writer is alive, or was faster.
        """
        identity = identity or Identity.of_this_process()
        for _ in range(_ACQUIRE_ROUNDS_MAX):
            attempts = _list_attempts(store)
            if attempts and not takeover:
                _raise_if_alive(store, attempts[-1], identity, heartbeat_seconds, sleep)
            previous = _newest_intact(store, attempts)
            attempt = (attempts[-1] if attempts else _highest_published(store, store.list())) + 1
            record = _LeaseRecord(
                attempt=attempt,
                heartbeat_seconds=heartbeat_seconds,
                **_inherited_fields(store, attempts, previous, identity),
            )
            if claimed_ids is not None:
                claimed_ids.add(record.write_id)
            # Read back after False: a `create` that was retried after a lost answer finds its own file. Where it is not
            # exclusive, someone may have overwritten ours, which `check` finds.
            created = store.create(_claim_name(record.attempt), record.to_bytes())
            if created or _was_written_by(_read_claim(store, record.attempt), record.write_id):
                claim = cls(store, record, previous=previous, clock=clock)
                claim.check()
                claim._prune(attempts)
                _log.info("claimed %s as attempt %d", store.url, record.attempt)
                return claim
        raise FencedError(
            f"{store.url}: another writer claimed the run faster {_ACQUIRE_ROUNDS_MAX} times; start one job at a time"
        )

    @property
    def attempt(self) -> int:
        """Fencing epoch: 1 for the first writer of a run, higher for each later one."""
        return self._record.attempt

    @property
    def write_id(self) -> str:
        return self._record.write_id

    @property
    def prior_failures(self) -> FailureCount:
        """Failures of the attempts before this one."""
        return FailureCount(self._failures, self._record.seen_seconds)

    def begin_work(self) -> None:
        """Note that the attempt has begun a checkpoint: from now on its time counts. May be called repeatedly."""
        if self._work is Work.NONE:
            self._work_since = self._clock()
            self._work = Work.RUNNING

    def end_work(self, *, lost: bool) -> None:
        """Note that the job of this attempt is over. `lost`: by an interruption. No effect unless its time counts."""
        if self._work is Work.RUNNING:
            self._work_seconds = self._clock() - self._work_since
            self._work = Work.LOST if lost else Work.LEFT

    def resume_work(self) -> None:
        """Continue the job of the previous claim under this one, so that it does not count as lost."""
        previous = self._previous
        if previous is not None and previous.attempt == self.attempt - 1 and previous.work is Work.RUNNING:
            self._failures = previous.failures
            self.begin_work()

    def check(self, *, without_retries: bool = False) -> None:
        """Check that this process still holds the lease. Call before every visible change. `without_retries`: ask
        the store once, for a caller that retries by itself. Raises `FencedError` if the lease is lost, and `StoreError`
        if that is unknown.
        """
        store, url, attempt = self._store, self._store.url, self.attempt
        if without_retries:
            store = self._unretried_store
        attempts = _list_attempts(store)
        while attempts and attempts[-1] > attempt:
            owner = _read_claim(store, attempts[-1])
            if owner is not None and owner.write_id in self.unanswered:
                store.delete(_claim_name(attempts.pop()))  # nobody writes as that attempt
                continue
            who = f"process {owner.pid} on {owner.host}" if owner else "another writer"
            message = f"attempt {attempts[-1]} ({who}) took the run over; attempt {attempt} stops writing"
            raise FencedError(f"{url}: {message}; let only one job use this URL, and end the other")
        mine = _read_claim(store, attempt) if attempt in attempts else None
        if not _was_written_by(mine, self.write_id):
            who = f"process {mine.pid} on {mine.host} wrote over" if mine else "someone removed"
            raise FencedError(
                f"{url}: {who} the claim {_claim_name(attempt)} of this writer; it stops writing; see that no other "
                "job uses this URL, then start again"
            )

    def beat(self) -> None:
        """Show other hosts that this writer is alive; call every `heartbeat_seconds`. Raises as `check`."""
        with self._lock:
            if self._record.released:
                return
            self.check()
            self._write_record(self._record.model_copy(update={"beat": self._record.beat + 1}))

    def release(self) -> None:
        """Record that this writer has ended in order, so that the next need not wait. A failure is only logged."""
        with self._lock:
            if self._record.released:
                return
            try:
                self.check()
                self._write_record(self._record.model_copy(update={"released": True}))
            except (FencedError, StoreError) as error:
                _log.warning("the claim on the run could not be released: %s", error)

    def _write_record(self, record: _LeaseRecord) -> None:
        work = self._work  # before its seconds, which `end_work` sets first
        seconds = self._clock() - self._work_since if work is Work.RUNNING else self._work_seconds
        record = record.model_copy(update={"failures": self._failures, "work": work, "work_seconds": seconds})
        self._store.write(_claim_name(record.attempt), record.to_bytes())
        self._record = record

    def _prune(self, older: list[int]) -> None:
        for attempt in older[: len(older) + 1 - _KEPT_CLAIMS]:
            try:
                self._store.delete(_claim_name(attempt))
            except StoreError as error:  # it costs a line in a listing, and the next start retries
                _log.warning("an old claim on the run could not be removed: %s", error)


def read_failure_count(store: Store) -> FailureCount:
    """Return the failures counted by the run's newest claim, with a running attempt's time. Raises `StoreError`."""
    newest = _newest_intact(store, _list_attempts(store))
    return FailureCount() if newest is None else newest.failures_with_own(is_over=False)


def newest_attempt(store: Store) -> int:
    """Return the highest attempt claimed or published in this run; 0 for a new run. Raises `StoreError`."""
    objects = store.list()
    attempts = _list_attempts(store, objects)
    if _is_newest_named(store, attempts):  # then every writer that published had a claim
        return max([*attempts, *(found.attempt for found in old_slices(objects))])
    return max([*attempts, _highest_published(store, objects)])


def plain_names_are_first(store: Store, objects: Sequence[ObjectInfo]) -> bool:
    """Whether a manifest without an attempt in its name is of attempt 1: no older version has written to this run."""
    return _is_newest_named(store, _list_attempts(store, objects))


def _is_newest_named(store: Store, attempts: Sequence[int]) -> bool:
    record = _read_claim(store, attempts[-1]) if attempts else None
    return record is not None and record.named


def _are_manifests_named(store: Store, older: Sequence[int], previous: _LeaseRecord | None) -> bool:
    if older:
        return previous is not None and previous.attempt == older[-1] and previous.named
    return not manifests_in(store.list())


def _newest_intact(store: Store, attempts: Sequence[int]) -> _LeaseRecord | None:
    """Return the newest claim that is not damaged; counts of newer ones are lost. None without one."""
    claims = (_read_claim(store, attempt) for attempt in reversed(attempts))
    return next((claim for claim in claims if claim is not None), None)


def find_possibly_live_writer(store: Store, before_attempt: int) -> str:
    """Return the holder of the newest attempt before this one if it may be alive; else empty. Never waits. In the same
    place its process is looked up, whatever its claim says; elsewhere a claim that is not released counts as alive.
    """
    older = [attempt for attempt in _list_attempts(store) if attempt < before_attempt]
    record = _read_claim(store, older[-1]) if older else None
    mine = Identity.of_this_process()
    if record is None or record.identity == mine:
        return ""
    is_here = mine.shares_pid_namespace(record.identity)
    lives = record.identity.is_running() if is_here else not record.released
    return _describe_holder(record) if lives else ""


def find_local_writer(store: Store) -> str:
    """Return another process in this place that has claimed the run, released or not, and is running; else empty."""
    mine = Identity.of_this_process()
    for attempt in reversed(_list_attempts(store)):
        record = _read_claim(store, attempt)
        if record is None or record.identity == mine or not mine.shares_pid_namespace(record.identity):
            continue
        if record.identity.is_running():
            return _describe_holder(record)
    return ""


def _describe_holder(record: _LeaseRecord) -> str:
    return f"process {record.pid} on {record.host} (attempt {record.attempt})"


def claim_attempt(store: Store, attempt: int) -> bool:
    """Claim this attempt for a job without a lease, so that later attempts are higher. False: it was taken."""
    older = [one for one in _list_attempts(store) if one < attempt]
    fields = _inherited_fields(store, older, _newest_intact(store, older), Identity.of_this_process())
    record = _LeaseRecord(attempt=attempt, heartbeat_seconds=1.0, released=True, **fields)
    created = store.create(_claim_name(attempt), record.to_bytes())
    return created or _was_written_by(_read_claim(store, attempt), record.write_id)


def _inherited_fields(
    store: Store, older: Sequence[int], previous: _LeaseRecord | None, identity: Identity
) -> dict[str, Any]:
    """Return the fields of a new claim that say who writes, and what is known of the attempts before."""
    seen = FailureCount() if previous is None else previous.failures_with_own(is_over=True)
    named = _are_manifests_named(store, older, previous)
    counted = {"failures": seen.failures, "seen_seconds": seen.seconds}
    return {"write_id": uuid.uuid4().hex, "beat": 0, "named": named, **asdict(identity), **counted}


def _claim_name(attempt: int) -> str:
    return f".holdfast/writer-{attempt:06d}.json"


def _list_attempts(store: Store, objects: Sequence[ObjectInfo] | None = None) -> list[int]:
    """Return all claimed attempts that still have a file, ascending. A number far above all others is not ours: it
    might leave no number for the next writer.
    """
    objects = store.list() if objects is None else objects
    found = sorted(
        (int(match[1]), info) for info in objects if (match := _NAME.fullmatch(info.name)) is not None
    )
    published = [int(match[1]) for info in objects if (match := _PUBLISHED.search(info.name)) is not None]
    attempts: list[int] = []
    for attempt, info in found:
        below = max([*attempts[-1:], *(one for one in published if one <= attempt)], default=0)
        if attempt - below <= _ATTEMPTS_SKIPPED_MAX:
            attempts.append(attempt)
        else:
            _log.warning(
                "%s/%s: its number is far above all others, so it is no claim that holdfast has made, and is not "
                "counted; find out who wrote it, and remove it",
                store.url,
                info.name,
            )
    return attempts


def _highest_published(store: Store, objects: Sequence[ObjectInfo]) -> int:
    """Return the highest attempt of manifests, slices and rewinds, which remain if `.holdfast/` is cleared."""
    rewound = (attempt for info in objects if (attempt := rewind_attempt(info.name)) is not None)
    highest = max((*rewound, *(found.attempt for found in old_slices(objects))), default=0)
    for listed in newest_first(store, objects, plain_names_are_first=False):
        try:
            return max(highest, Manifest.from_bytes(store.read(listed.name), source=listed.name).attempt)
        except (DamageError, StoreMissing) as error:
            _log.warning("a file is not counted when the number of the next attempt is chosen: %s", error)
    return highest


def _read_claim(store: Store, attempt: int) -> _LeaseRecord | None:
    """Return the claim of this attempt; None if it is gone or damaged."""
    name = _claim_name(attempt)
    reason = "its CRC-32 does not hold"
    try:
        body = unseal(store.read(name, _CLAIM_BYTES_MAX), _CRC_FIELD)
        if body is not None:
            record = _LeaseRecord.model_validate_json(body)
            if record.attempt == attempt:
                return record
            reason = f"it names attempt {record.attempt}"
    except StoreMissing:
        return None
    except DamageError as error:
        reason = str(error)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"]
    _log.warning(
        "%s/%s: damaged claim (%s), which is taken for that of a dead writer", store.url, name, reason
    )
    return None


def _was_written_by(record: _LeaseRecord | None, write_id: str) -> bool:
    return record is not None and record.write_id == write_id


def _raise_if_alive(
    store: Store, attempt: int, identity: Identity, heartbeat_seconds: float, sleep: Callable[[float], None]
) -> None:
    """Raise `FencedError` if the writer of claim `attempt` is alive."""
    first = _read_claim(store, attempt)
    if first is None or first.released:
        return
    if identity.shares_pid_namespace(first.identity):
        if first.identity.is_running():
            raise FencedError(_alive_message(store, first, "is running"))
        return
    interval_seconds = min(max(heartbeat_seconds, first.heartbeat_seconds), _HEARTBEAT_SECONDS_MAX)
    watched_seconds = 2 * interval_seconds
    _log.info(
        "%s: watching the writer of attempt %d on %s for %.1f s",
        store.url,
        attempt,
        first.host,
        watched_seconds,
    )
    for _ in range(2 * _LOOKS_PER_HEARTBEAT):
        sleep(interval_seconds / _LOOKS_PER_HEARTBEAT)
        now = _read_claim(store, attempt)
        if now is None or now.released:
            return
        if now.beat != first.beat:
            raise FencedError(_alive_message(store, first, "gave a sign of life just now"))


def _alive_message(store: Store, record: _LeaseRecord, sign: str) -> str:
    return (
        f"{store.url}: attempt {record.attempt} owns this run: process {record.pid} on {record.host} {sign}. "
        "Wait for it or end it; each run has one writer"
    )
