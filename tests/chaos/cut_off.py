"""A flusher is cut off from its S3 server right at a request, another host takes the run over, then the link returns.

    host A ─► proxy ─► S3: saves steps 5, 6, 7 ─► at the request: connections are reset ─► retries … ─► the link is back
    host B ──────────► S3:                            takes the run over, saves the same steps       │
    host A:                                                                                          └─► fenced

A retries its request for minutes. The first try that gets through checks the claim first: A sends no request any more
that others could see. The freezes (freezing.py) stop a process between its check and its request; here A keeps running.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from tests.chaos.freezing import STEPS, check_winner, clear_away, host, objects, opened, take_over
from tests.faults.flushing import image_of, wait_until
from tests.support.fault_proxy import Fault, FaultProxy, Request, Rule, running_proxy
from tests.support.s3_place import S3Place
from tests.support.stager_client import StagerClient

__all__ = ["CUT_CELLS", "CutCell", "play_cut"]

CHUNK_BYTES, IMAGE_BYTES = 64 << 10, 200_000
_CHANGES = frozenset({"PutObject", "CompleteMultipartUpload", "DeleteObject"})


class CutCell(NamedTuple):
    """One run.

    Attributes:
        act: Name of the request that meets the cut link.
        operation: Its S3 operation, and `key`: the suffix of its object's name.
    """

    act: str
    operation: str
    key: str

    @property
    def regular(self) -> bool:
        """Whether `make check` runs it."""
        return self.key.endswith("6.json")

    @property
    def store(self) -> str:
        """Its column in the table."""
        return "S3"

    @property
    def name(self) -> str:
        """In test ids and results."""
        return f"{self.act} on {self.store}"


CUT_CELLS = (
    CutCell("cut off before a file gets its name", "CompleteMultipartUpload", "step-000000006.pt"),
    CutCell("cut off before a manifest", "PutObject", "step-000000006.json"),
    CutCell("cut off before a removal", "DeleteObject", "step-000000005.json"),
)


def play_cut(cell: CutCell, place: S3Place, directory: Path) -> None:
    """Play one cell at a fresh run."""
    url = place.url()
    ours = [image_of(directory, seed, nbytes=IMAGE_BYTES, chunk_bytes=CHUNK_BYTES) for seed in (1, 2)]
    with running_proxy(place.endpoint) as link:
        link.add(Rule(Fault.RESET_BEFORE, cell.operation, cell.key, times=None))
        with (
            host(directory, "a", url, env={"AWS_ENDPOINT_URL": link.endpoint}) as cut,
            contextlib.closing(StagerClient(cut.directory)) as stager,
        ):
            for step in STEPS:
                stager.save(ours[0], step)
            wait_until(
                lambda: bool(link.hits()),
                lambda: f"{cell.operation} of {cell.key} never came: {_changes(link, 0)}",
            )
            link.add(Rule(Fault.RESET_BEFORE, times=None))
            take_over(directory, url, ours[1])
            with contextlib.closing(opened(url)) as closing:
                before = objects(closing.store, "-a002")
                assert cut.process.poll() is None, "it has given up, and shows nothing"
                seen = len(link.requests())
                link.clear()
                assert cut.process.wait(90) == 8, cut.log.read_text()[-3000:]
                check_winner(closing.store, before)
            late = _changes(link, seen)
            assert not late, f"replaced, and then it sent {late}"
    clear_away(directory, url, before)


def _changes(link: FaultProxy, seen: int) -> list[Request]:
    """The visible changes among the requests after the first `seen`."""
    return [
        request
        for request in link.requests()[seen:]
        if request.operation in _CHANGES and "/step-" in f"/{request.key}"
    ]
