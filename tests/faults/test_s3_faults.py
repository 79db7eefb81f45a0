"""The flusher writes to a real Swift through a proxy that breaks requests; then the test checks the server directly.

Each test checks: all checkpoints durable, verified and equal byte for byte; nothing twice, nothing half, no open
upload; a bounded number of requests.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.verification import verify_file
from holdfast.errors import HoldfastError
from holdfast.image.manifest import State
from holdfast.ring.journal import SlotState
from holdfast.store import open_store
from holdfast.store.retrying import RetryBudget, Retrying
from tests.faults.flushing import FaultedFlusher, image_of, original, wait_until
from tests.support.fault_proxy import Fault, FaultProxy, Rule, running_proxy
from tests.support.images import Image
from tests.support.job import REPOSITORY
from tests.support.restoring import Ranks
from tests.support.s3_place import S3Place, plain_client
from tests.support.stager_client import StagerClient
from trainer_side.restore.restore import restore

pytestmark = pytest.mark.s3

CHUNK_BYTES = 1 << 20
IMAGE_BYTES = 6 << 20
PARTS = 2  # of 5 MiB
STEPS = (5, 10, 15)
SEEDS = (1, 2)
SITE = str(REPOSITORY / "tests" / "faults" / "impatient_site")


class Faulty(NamedTuple):
    """A bucket on a real server, and the proxy in front of it."""

    place: S3Place
    proxy: FaultProxy

    @property
    def url(self) -> str:
        """URL of the run."""
        return self.place.url("team/run")


@pytest.fixture
def faulty(swift_s3: S3Place) -> Iterator[Faulty]:
    with running_proxy(swift_s3.endpoint, seed=7) as proxy:
        yield Faulty(swift_s3, proxy)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Image]:
    directory = tmp_path_factory.mktemp("images")
    return [image_of(directory, seed, nbytes=IMAGE_BYTES, chunk_bytes=CHUNK_BYTES) for seed in SEEDS]


def start(
    faulty: Faulty, base: Path, *options: str, ring: str = "24MiB", impatient: bool = False
) -> FaultedFlusher:
    """A flusher that reaches the store through the proxy. `impatient`: with short timeouts for answers."""
    env = {
        **faulty.place.environment,
        "AWS_ENDPOINT_URL": faulty.proxy.endpoint,
        "PYTHONPATH": f"{SITE}:{REPOSITORY}" if impatient else str(REPOSITORY),
    }
    flusher = FaultedFlusher(base, faulty.url, *options, env=env, chunk="1MiB", ring=ring)
    assert flusher.said.get("ready"), flusher.log.read_text()
    return flusher


@contextlib.contextmanager
def staging(flusher: FaultedFlusher) -> Iterator[StagerClient]:
    """The flusher's stager; at the end the flusher must drain and exit with 0, without a traceback in its log."""
    stager = StagerClient(flusher.directory)
    try:
        yield stager
        stager.finish()
        assert [m for m in stager.heard if m.kind in {"failed", "bad"}] == []
        assert flusher.wait() == 0
    finally:
        stager.close()
        if flusher.process.poll() is None:
            flusher.kill()
    assert "Traceback" not in flusher.log.read_text()


def flush_all(flusher: FaultedFlusher, images: list[Image]) -> None:
    """Flush several checkpoints, until all are durable."""
    with staging(flusher) as stager:
        for step, image in zip(STEPS, itertools.cycle(images), strict=False):
            stager.save(image, step)


def check_server(
    faulty: Faulty, images: list[Image], *, states: tuple[State, ...] = (State.VERIFIED,)
) -> None:
    """Check that the server has these checkpoints, equal byte for byte, and nothing else."""
    with contextlib.closing(cast(Retrying, open_store(faulty.url))) as store:
        items = sorted(Catalog(store).list(), key=lambda item: item.step)
        assert [item.step for item in items] == list(STEPS)
        for item in items:
            assert item.manifest is not None, item.fault
            assert item.state in states
            assert verify_file(store, item.manifest).ok
    client = plain_client()
    try:
        for step, image in zip(STEPS, itertools.cycle(images), strict=False):
            key = f"team/run/step-{step:09d}.pt"
            with client.get_object(Bucket=faulty.place.bucket, Key=key)["Body"] as body:
                assert body.read() == image.final
        listed = client.list_objects_v2(Bucket=faulty.place.bucket)["Contents"]
        keys = {found["Key"] for found in listed}
        claims = {key for key in keys if key.startswith("team/run/.holdfast/writer-")}
        assert keys - claims == {
            f"team/run/step-{step:09d}.{end}" for step in STEPS for end in ("pt", "json")
        }
        assert len(claims) == 1
        assert not client.list_multipart_uploads(Bucket=faulty.place.bucket).get("Uploads")
    finally:
        client.close()


CREATE, PART, COMPLETE = "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"
PUT, DELETE, GET, HEAD = "PutObject", "DeleteObject", "GetObject", "HeadObject"
LIST, LIST_UPLOADS = "GETBucket", "ListMultipartUploads"
EVERY = (CREATE, PART, COMPLETE, PUT, DELETE, GET, HEAD, LIST, LIST_UPLOADS)
STATUSES = (Fault.INTERNAL_ERROR, Fault.UNAVAILABLE, Fault.SLOW_DOWN, Fault.TOO_MANY)


def each(
    faults: tuple[Fault, ...], operations: tuple[str, ...], *, first: int = 2, key: str = ""
) -> list[Rule]:
    """These faults one after the other, from the `first` request of each operation on.

    The list of uploads is requested only after a fault of `CREATE`, so its counter starts one earlier.
    """
    return [
        Rule(fault, operation, first=first + later - (operation == LIST_UPLOADS), key=key)
        for operation in operations
        for later, fault in enumerate(faults)
    ]


SCENARIOS = {
    "reset before": each((Fault.RESET_BEFORE,), EVERY),
    "reset in the body": each((Fault.RESET_MIDWAY,), (PART, PUT, COMPLETE)),
    "lost answer": each((Fault.LOST_ANSWER,), EVERY) + each((Fault.LOST_ANSWER,), EVERY, first=4),
    "answer that never comes": each((Fault.STALL,), (CREATE, PART, COMPLETE, PUT)),
    "statuses": each(STATUSES, EVERY),
    "complete": each((Fault.CONFLICT, Fault.ERROR_IN_200), (COMPLETE,)),
    "truncated": each((Fault.TRUNCATED,), (GET, LIST)) + each((Fault.TRUNCATED,), (GET,), first=3, key=".pt"),
    "wrong byte": each((Fault.WRONG_BYTE,), (GET,), key=".pt"),
}


@pytest.mark.parametrize("rules", SCENARIOS.values(), ids=SCENARIOS)
def test_a_fault_of_each_operation_costs_a_retry_and_nothing_else(
    faulty: Faulty, images: list[Image], tmp_path: Path, rules: list[Rule]
) -> None:
    faulty.proxy.add(*rules)
    stalls = any(rule.fault is Fault.STALL for rule in rules)
    flush_all(start(faulty, tmp_path, impatient=stalls), images)
    hits = faulty.proxy.hits()
    assert {request.operation for request in hits} == {rule.operation for rule in rules}
    assert {request.fault for request in hits} == {rule.fault for rule in rules}
    check_server(faulty, images)
    struck = Counter(request.operation for request in hits)
    least = {CREATE: len(STEPS), PART: len(STEPS) * PARTS, COMPLETE: len(STEPS)}
    for operation, expected in least.items():
        came = len(faulty.proxy.requests(operation))
        assert expected <= came <= expected + struck[operation], f"{operation}: {came} requests"


def test_a_tenth_of_all_requests_fails_and_nobody_notices(
    faulty: Faulty, images: list[Image], tmp_path: Path
) -> None:
    faulty.proxy.add(*a_tenth())
    flush_all(start(faulty, tmp_path), images)
    check_server(faulty, images)
    check_a_tenth(faulty)
    struck = sum(request.operation == PART for request in faulty.proxy.hits())
    assert len(faulty.proxy.requests(PART)) == len(STEPS) * PARTS + struck


def a_tenth() -> list[Rule]:
    """About every tenth request fails, with one fault or another."""
    kinds = (Fault.RESET_BEFORE, Fault.RESET_MIDWAY, Fault.LOST_ANSWER, *STATUSES)
    return [Rule(fault, times=None, probability=0.1 / len(kinds)) for fault in kinds]


def check_a_tenth(faulty: Faulty) -> None:
    """Check that the proxy injected enough faults; otherwise the test proves nothing."""
    came, hit = len(faulty.proxy.requests()), len(faulty.proxy.hits())
    assert hit >= came // 40, f"only {hit} of {came}"


def test_retries_are_few_and_their_waits_grow_and_are_random(
    faulty: Faulty, images: list[Image], tmp_path: Path
) -> None:
    failures = 4
    keys = [f"step-{step:09d}.pt" for step in STEPS[:2]]
    faulty.proxy.add(*(Rule(Fault.SLOW_DOWN, COMPLETE, key=key, times=failures) for key in keys))
    flush_all(start(faulty, tmp_path, "--no-verify"), images)
    check_server(faulty, images, states=(State.DURABLE,))
    waits = []
    for key in keys:
        instants = [request.at for request in faulty.proxy.requests(COMPLETE, key=key)]
        assert len(instants) == failures + 1, "a failure costs exactly one more request"
        waits.append([after - before for before, after in itertools.pairwise(instants)])
    budget = RetryBudget()
    assert any(wait > budget.first_wait_seconds for one in waits for wait in one), (
        f"they do not grow: {waits}"
    )
    apart = [abs(one - other) for one, other in zip(*waits, strict=True)]
    assert max(apart) > 0.05, f"two writers would come back at the same moments: {waits}"


def test_a_checkpoint_waits_in_the_ring_for_a_server_that_is_gone_for_a_while(
    faulty: Faulty, images: list[Image], tmp_path: Path
) -> None:
    faulty.proxy.add(Rule(Fault.RESET_BEFORE, PART, times=None))
    flusher = start(faulty, tmp_path)
    with staging(flusher) as stager:
        stager.save(images[0], STEPS[0])
        wait_until(lambda: len(faulty.proxy.requests(PART)) >= 8, flusher.log.read_text)
        instants = [request.at for request in faulty.proxy.requests(PART)]
        assert instants[-1] - instants[0] > 0.2, "it hammers a server that is down"
        stager.save(images[1], STEPS[1])  # the ring has room for it: the training continues
        assert [m for m in stager.heard if m.kind in {"durable", "failed"}] == []
        faulty.proxy.clear()
        stager.save(images[0], STEPS[2])
    check_server(faulty, images)


def test_a_slow_store_fills_the_ring_and_takes_no_other_memory(
    faulty: Faulty, images: list[Image], tmp_path: Path
) -> None:
    faulty.proxy.bytes_per_second = 6 << 20
    flusher = start(faulty, tmp_path, ring="8MiB")
    free_least, most_bytes = 8, 0
    before_bytes = flusher.resident_bytes()
    with staging(flusher) as stager:
        for step, image in zip(STEPS, itertools.cycle(images), strict=False):
            stager.begin(image, step)
            for chunk in range(image.layout.chunks):
                stager.send(image, step, [chunk])  # waits for a slot
                states = [stager.ring.state(slot) for slot in range(stager.ring.ring_chunks)]
                free_least = min(free_least, states.count(SlotState.FREE))
                most_bytes = max(most_bytes, flusher.resident_bytes())
            stager.staged(image, step)
    assert free_least == 0, "the store was not slow enough to fill the ring"
    assert most_bytes - before_bytes < 48 << 20, f"{(most_bytes - before_bytes) >> 20} MiB beside the ring"
    check_server(faulty, images)


@pytest.mark.parametrize(
    ("fault", "probability", "expected"),
    [
        (Fault.TRUNCATED, 0.3, {"right"}),
        (Fault.TRUNCATED, 1.0, {"store"}),
        (Fault.WRONG_BYTE, 0.05, {"right", "damage"}),
        (Fault.WRONG_BYTE, 1.0, {"damage"}),
    ],
    ids=["some cut", "all cut", "some wrong", "all wrong"],
)
def test_restore_gives_the_right_bytes_or_a_named_error(
    faulty: Faulty,
    images: list[Image],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    probability: float,
    expected: set[str],
) -> None:
    flush_all(start(faulty, tmp_path, "--no-verify"), images)
    faulty.proxy.add(Rule(fault, GET, times=None, probability=probability))
    monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.proxy.endpoint)
    opened = cast(Retrying, open_store(faulty.url))
    quick = Retrying(
        opened.inner, budget=RetryBudget(attempts_max=12, first_wait_seconds=0.001, wait_seconds_max=0.01)
    )
    state = {f"layer.{n}": torch.zeros(IMAGE_BYTES // 16) for n in range(4)}
    with contextlib.closing(quick):
        try:
            (restored,) = Ranks(1).run(lambda peers: restore(state, quick, peers, events=None))
            outcome, message = "right", faulty.url
        except HoldfastError as error:
            outcome, message = error.code, str(error)
    assert outcome in expected, message
    assert faulty.url in message
    if outcome == "right":
        assert restored is not None
        want = original(SEEDS[STEPS.index(restored.step) % len(SEEDS)], nbytes=IMAGE_BYTES)
        assert all(torch.equal(state[name], want[name]) for name in state)
