"""Two ranks, one of which breaks: `python breaking.py OUT HOW`; each rank's errors go to OUT/met-RANK as JSON.

HOW: a thread of rank 1 (`copy`, `link`, `lane`, `council`, `watch`, `payloads`, `reconnect`) that gets a bug after the
first checkpoints. Or how the script ends: `raise` on rank 1, while the others wait for it; `all`; `exit`, by
`sys.exit(3)`; `done`, by `sys.exit(0)`; `stop`, by Ctrl-C; `generator`: the loop is a generator that is closed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from trainer_side import Checkpointer, init_torch_distributed
from trainer_side.link.inbox import StagerInbox
from trainer_side.notice.watch import NoticeWatch
from trainer_side.ranks.payload_sender import PayloadSender
from trainer_side.ranks.tcp_stager_port import TcpStagerPort
from trainer_side.save.copier import Copier
from trainer_side.tiers.commit_votes import Voter
from trainer_side.tiers.tier_writer_threads import TierWriterThreads

STEPS, BREAKS_AT = 8, 3
MEET_SECONDS_MAX = 10
PLACES: dict[str, tuple[type, str]] = {
    "copy": (Copier, "_try_copy"),
    "link": (StagerInbox, "handle"),
    "lane": (TierWriterThreads, "_next"),
    "council": (Voter, "handle"),
    "watch": (NoticeWatch, "_poll"),
    "payloads": (PayloadSender, "next_payload"),
    "reconnect": (TcpStagerPort, "_reopen"),
}


def plant(how: str, checkpointer: Checkpointer) -> None:
    def bug(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a planted bug")

    place, name = PLACES[how]
    setattr(place, name, bug)
    if how == "reconnect":
        link: Any = checkpointer._link
        link._session.port._sock.shutdown(2)
    if how == "watch":
        os.kill(os.getpid(), signal.SIGUSR1)


def meet(checkpointer: Checkpointer, step: int) -> None:
    """Wait until the step is safe, or has failed."""
    deadline = time.monotonic() + MEET_SECONDS_MAX
    while time.monotonic() < deadline and max(checkpointer.staged_step, checkpointer.kept_step) < step:
        if checkpointer.stats.declined + checkpointer.stats.failed or checkpointer.stats.skipped:
            return
        time.sleep(0.01)


def train(checkpointer: Checkpointer, value: torch.Tensor, how: str, saved: list[bool]) -> Generator[int]:
    rank = checkpointer.rank
    for step in range(checkpointer.restore(), STEPS):
        torch.distributed.all_reduce(torch.ones(1))
        if step == BREAKS_AT and rank == 1 and how in PLACES:
            plant(how, checkpointer)
        if step == BREAKS_AT and how not in PLACES:
            stop_the_flusher(checkpointer)
        if step == BREAKS_AT + 1:
            end(how, rank)
        value += 1
        begun = time.monotonic()
        saved.append(checkpointer.save(step))
        assert time.monotonic() - begun < 30
        meet(checkpointer, step)
        yield step


def stop_the_flusher(checkpointer: Checkpointer) -> None:
    """Stop the flusher once earlier steps are durable; later ones cannot be."""
    while checkpointer.durable_step < BREAKS_AT - 1:
        time.sleep(0.01)
    torch.distributed.barrier()
    if checkpointer.rank == 0:
        (pid,) = Path(os.environ["HOLDFAST_RUNTIME_DIR"]).rglob("flusher.pid")
        os.kill(int(pid.read_text().split()[0]), signal.SIGSTOP)
    torch.distributed.barrier()


def end(how: str, rank: int) -> None:
    if how == "all" or (how, rank) == ("raise", 1):
        raise ValueError("the bug of the script")
    if how in ("exit", "done"):
        sys.exit(3 if how == "exit" else 0)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def main() -> None:
    out, how = Path(sys.argv[1]), sys.argv[2]
    out.mkdir(exist_ok=True)
    rank, _ = init_torch_distributed("gloo")
    value, saved = torch.zeros(100_000), list[bool]()
    met: dict[str, Any] = {"error": "", "saved": saved}
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    try:
        with Checkpointer({"value": value}) as checkpointer:
            steps = train(checkpointer, value, how, saved)
            for step in steps:
                met |= {"step": step, "causes": checkpointer.stats.causes}
                if how == "generator" and step == BREAKS_AT:
                    raise GeneratorExit
    except BaseException as error:
        met["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        met["left"] = True
        (out / f"met-{rank}").write_text(json.dumps(met))


if __name__ == "__main__":
    main()
