"""`python -m tests.late.forked POLICIES FILE...`: each file in a process of its own, forked from one with torch.

A test may count what its whole process has locked and allocated, or break its generator. Importing torch for each of
them would be half of all that they take.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch._dynamo  # what the first optimizer imports


def _run(policies: str, file: str) -> int:
    """The exit code of pytest, in a child; it is the first in which the device is touched."""
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    pid = os.fork()
    if pid == 0:
        code = pytest.main(
            ["-p", "tests.late.plugin", "-p", "no:cacheprovider", "--late-policies", policies, "-q", file]
        )
        sys.stdout.flush()
        os._exit(code)
    return os.waitpid(pid, 0)[1]


if __name__ == "__main__":
    codes = [_run(sys.argv[1], file) for file in sys.argv[2:]]
    sys.exit(any(codes))
