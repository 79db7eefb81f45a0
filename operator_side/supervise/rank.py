"""`python -m operator_side.supervise.rank ROLE COMMAND …`: wraps one process of the job, reports its start and its end.

    mpirun ── daemon ── this ── COMMAND        a line on stderr, which mpirun passes to the supervisor (job_output)

With ULFM, mpirun exits with 0 although a rank was killed, and never says which; without ULFM it names only the first.
This program therefore wraps each process of the job. SIGURG, which has no other effect and which mpirun forwards to all
processes of the job, asks the job to end: a trainer then gets SIGTERM, and the stager continues until the trainers have
left.

Imports only the standard library, because it runs before every rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from holdfast.process import count_oom_kills, set_parent_death_signal
from holdfast.supervised import emit, own_rank

TRAINER, STAGER = "trainer", "stager"
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # a shell's exit codes


def _prepare() -> None:
    set_parent_death_signal()
    # A notice may arrive before the rank handles it, or the rank may never do so: it must not kill the rank.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _start(command: Sequence[str]) -> subprocess.Popen[bytes] | int:
    """Start the command; if that fails, return the exit code that a shell would give."""
    try:
        # Safe: this process has one thread, and the function only makes two system calls.
        return subprocess.Popen(command, preexec_fn=_prepare)  # noqa: PLW1509
    except FileNotFoundError:
        code = _NOT_FOUND
    except OSError:
        code = _NOT_EXECUTABLE
    sys.stderr.write(
        f"holdfast run: {command[0]}: this command cannot be started on {os.uname().nodename}; check its path\n"
    )
    return code


def main() -> None:
    """Run the command and end with its status."""
    role, command = sys.argv[1], sys.argv[2:]
    rank = own_rank()
    set_parent_death_signal()
    killed_before = count_oom_kills()
    started = _start(command)
    if isinstance(started, int):
        emit("ended", rank=rank, status=started)
        sys.stderr.flush()
        os._exit(started)

    def end(*_: object) -> None:
        if role == TRAINER:
            started.terminate()

    signal.signal(signal.SIGURG, end)
    # mpirun sends these to the whole process group, so the command gets them as well.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    emit("began", rank=rank, host=os.uname().nodename, pid=started.pid)
    status = started.wait()
    memory_fields = {"out_of_memory": True} if status and count_oom_kills() > killed_before else {}
    emit("ended", rank=rank, status=status, **memory_fields)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
