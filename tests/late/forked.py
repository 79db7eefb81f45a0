"""`python -m tests.late.forked POLICIES FILE...`: runs each file in a process of its own, forked from one with torch.

A test may count the memory that its whole process has locked and allocated, or break the generator. Importing torch in
each process would double the time.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch._dynamo  # the first optimizer imports it


def _run(policies: str, file: str) -> int:
    """Run pytest in a child; return its exit code. The parent never touches the device."""
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
