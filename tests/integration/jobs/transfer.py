"""A trainer without a model: sends synthetic images through a Link, to test the transfer alone.

`python transfer.py OUT SCENARIO IMAGE_BYTES STEPS`. Writes to OUT, per rank, each step's outcome as JSON. In the
scenario `wait-at-3` the ranks wait after step 3 for the directory `go-on` beside OUT.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from holdfast.config import TrainerConfig
from holdfast.crc import crc32
from holdfast.errors import HoldfastError
from holdfast.image.entries import REPLICATED, Entry, TensorInfo
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.image.slices import area_bytes, frames_of
from holdfast.telemetry.causes import DeclineCause
from holdfast.telemetry.events import EventLog
from holdfast.wire.state_messages import Proposal
from trainer_side.joining import join
from trainer_side.link.inbox import StagerInbox
from trainer_side.link.to_stager import ToStager
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.pace.schedule import Schedule
from trainer_side.ranks.joined import join_world
from trainer_side.transfer import TransferState

WAIT_SECONDS_MAX = 120.0


class Slice:
    """A SliceSource over plain memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._data[offset : offset + nbytes]

    def is_ready(self, offset: int) -> bool:
        return True

    def is_complete(self) -> bool:
        return True


def layout(image_bytes: int, chunk_bytes: int, ranks: int) -> Layout:
    """Return a layout of odd sizes and owners, each entry followed by its CRC field; most cross chunk borders.

    The first entries are tiny and rotate among ranks: frames of their chunks have more pieces than travel separately.
    """
    draw = random.Random(image_bytes)
    entries: list[Entry] = []
    offset = 100
    tiny = 100 * ranks if image_bytes > 60_000 * ranks else 0
    while offset < image_bytes - 1000:
        nbytes = min(draw.randrange(1, chunk_bytes * 2), image_bytes - 500 - offset)
        owner = draw.choice([REPLICATED, REPLICATED, *range(ranks)])
        if len(entries) < tiny:
            nbytes, owner = draw.randrange(1, 40), len(entries) % ranks
        entries.append(Entry(f"archive/data/{len(entries)}", offset, nbytes, owner, (offset + nbytes + 4,)))
        offset += nbytes + draw.randrange(64, 300)
    tensors = tuple(
        TensorInfo(entry.name, "uint8", (entry.nbytes,), index) for index, entry in enumerate(entries)
    )
    return Layout(image_bytes, chunk_bytes, ranks, tuple(entries), tensors)


def image(plan: Layout, step: int, *, patched: bool) -> bytes:
    """Return the image of a step as it is sent (CRC fields zero), or `patched` as in the file."""
    data = bytearray(random.Random(step).randbytes(plan.image_bytes))
    for entry in plan.entries:
        for place in entry.crc_fields:
            data[place : place + 4] = b"\0\0\0\0"
    if patched:
        for entry in plan.entries:
            for place in entry.crc_fields:
                data[place : place + 4] = crc32(bytes(data[entry.offset : entry.end])).to_bytes(4, "little")
    return bytes(data)


def my_slice(plan: Layout, data: bytes, rank: int) -> bytes:
    area = bytearray(area_bytes(plan, rank))
    for frame in frames_of(plan, rank):
        area[frame.offset : frame.offset + frame.nbytes] = b"".join(
            data[e.offset : e.end] for e in frame.extents
        )
    return bytes(area)


def proposal(plan: Layout, *, changed: str = "") -> Proposal:
    table: list[list[Any]] = [
        [t.path, "float64" if t.path == changed else t.dtype, list(t.shape), -1] for t in plan.tensors
    ]
    digest = f"{crc32(json.dumps(table).encode()):08x}"
    return Proposal(digest, table, pickle_bytes=70_000, per_rank_bytes={"rng": 5000 + len(changed)})


def kill_flusher() -> None:
    """Send SIGKILL to the flusher of this job."""
    for process in psutil.process_iter():
        try:
            same_job = process.environ().get("HOLDFAST_RUNTIME_DIR") == os.environ["HOLDFAST_RUNTIME_DIR"]
            if same_job and process.cmdline()[1:4] == ["-P", "-m", "flusher"]:
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def wait_for(path: Path) -> None:
    """Wait until the test has made `path`."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def main() -> None:
    out, scenario, image_bytes, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    said: dict[str, Any] = {"pid": os.getpid(), "steps": {}}
    rank = -1
    try:
        config = TrainerConfig()
        world = join_world(config)
        rank = world.rank
        inbox = StagerInbox(
            rank, AgreedSteps(wait_seconds_max=60.0), Schedule(auto=False, wait_seconds_max=60.0)
        )
        link = join(config, world, inbox, EventLog(None, role="trainer", rank=rank))
        run(link, scenario, image_bytes, steps, said)
    except HoldfastError as error:
        said["error"] = {"code": error.code, "message": str(error)}
    name = f"rank-{rank}.json" if rank >= 0 else f"pid-{os.getpid()}.json"
    (out / name).write_text(json.dumps(said))


def run(link: ToStager, scenario: str, image_bytes: int, steps: int, said: dict[str, Any]) -> None:
    plan = layout(image_bytes, link.job.chunk_bytes, link.job.ranks)
    changed = plan.tensors[1].path if scenario == "differ" and link.job.rank == 1 else ""
    agreement = link.agree(proposal(plan, changed=changed))
    said["agreement"] = [agreement.pickle_reserve_bytes, agreement.per_rank_reserve_bytes]
    for step in range(steps):
        if scenario == "decline" and step == 1 and link.job.rank == 1:
            link.decline(step, DeclineCause.OUTGROWN.because("of the test"), needed_pickle_bytes=200_000)
            continue
        if scenario == "flusher" and step == 1 and link.job.rank == 0:
            kill_flusher()
        data = my_slice(plan, image(plan, step, patched=False), link.job.rank)
        transfer = link.offer(step, Slice(data), SaveRecord(saved_at_unix=time.time()), plan)
        settled = transfer.settled.wait(WAIT_SECONDS_MAX) and transfer.released.wait(WAIT_SECONDS_MAX)
        if scenario == "wait-at-3" and step == 3:
            wait_for(Path(sys.argv[1]).with_name("go-on"))
        said["steps"][step] = {
            "state": transfer.state.value,
            "reason": str(transfer.reason or ""),
            "settled": settled,
        }
    link.close(wait_for=TransferState.DURABLE, seconds_max=WAIT_SECONDS_MAX)
    said["durable_step"], said["staged_step"] = link.job.durable_step, link.job.staged_step
    said["new_pickle_reserve_bytes"] = link.job.new_pickle_reserve_bytes
    said["problem"] = str(link.job.problem or "")


if __name__ == "__main__":
    main()
