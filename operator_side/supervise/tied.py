"""Commands tied to the process that starts them: a killed supervisor must not leave a job that collides with the next.

`python -m operator_side.supervise.tied SIGNAL PID COMMAND …` becomes COMMAND, which gets SIGNAL when its parent PID
dies; PID 0 is any parent.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from holdfast.process import set_parent_death_signal

_ANY = 0


def tied_command(command: Sequence[str], *, by: signal.Signals = signal.SIGTERM) -> list[str]:
    """Command line for this process's main thread to start. `by`: the signal that the command gets when we die."""
    return _line(command, by, os.getpid())


def tied_to_any_parent(command: Sequence[str]) -> list[str]:
    """Command line for another program to start; the command is killed when that program dies."""
    return _line(command, signal.SIGKILL, _ANY)


def _line(command: Sequence[str], by: signal.Signals, parent: int) -> list[str]:
    return [sys.executable, "-P", "-m", "operator_side.supervise.tied", str(int(by)), str(parent), *command]


def main() -> None:
    number, parent, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    set_parent_death_signal(number)
    if parent not in (_ANY, os.getppid()):  # the parent died before this process was tied to it
        os._exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the command line is this program's own
    except OSError as error:
        sys.exit(
            f"holdfast run: {command[0]}: this command cannot be started: {error.strerror}; check its path"
        )


if __name__ == "__main__":
    main()
