"""Commands tied to the process that starts them: a supervisor that is killed must not leave a job behind, which would
collide with the next one.

`python -m operator_side.supervise.tied SIGNAL PID COMMAND …` becomes COMMAND, which gets that signal when process PID,
its parent, dies; PID 0 stands for any parent.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from holdfast.process import tie

_ANY = 0


def tied(command: Sequence[str], *, by: signal.Signals = signal.SIGTERM) -> list[str]:
    """The line of a command for the main thread of this process to start. `by`: the signal it gets at our end."""
    return _line(command, by, os.getpid())


def tied_to_any(command: Sequence[str]) -> list[str]:
    """The line of a command for another program to start, with whose end it is killed."""
    return _line(command, signal.SIGKILL, _ANY)


def _line(command: Sequence[str], by: signal.Signals, parent: int) -> list[str]:
    return [sys.executable, "-P", "-m", "operator_side.supervise.tied", str(int(by)), str(parent), *command]


def main() -> None:
    number, parent, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    tie(number)
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
