"""`python -m tests.late [--policies P,Q] [--devices N] tests/gpu`: pytest on a simulated CUDA device."""

from __future__ import annotations

import argparse
import os
import sys

from tests.late.plugin import POLICIES
from tests.late.provision import NoLateRuntime, install


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.late", description=__doc__)
    parser.add_argument("--install", action="store_true", help="make the runtime and end")
    parser.add_argument(
        "--policies", default=POLICIES, help=f"when queued work is done (default: {POLICIES})"
    )
    parser.add_argument("--devices", type=int, default=2, help="how many devices there are (default: 2)")
    parser.add_argument("--device-mib", type=int, default=1024, help="MiB of memory of each (default: 1024)")
    parser.add_argument("--python", action="store_true", help="the arguments are Python's, not pytest's")
    known, rest = parser.parse_known_args()
    try:
        runtime = install()
    except NoLateRuntime as reason:
        print(f"no late runtime, its tests will be skipped: {reason}", file=sys.stderr)
        raise SystemExit(0 if known.install else 1) from None
    if known.install:
        print(runtime.libraries)
        return
    policy = known.policies.split(",")[0]
    environment = runtime.environment(policy=policy, devices=known.devices, device_mib=known.device_mib)
    pytest = ["-m", "pytest", "-p", "tests.late.plugin", "-p", "no:cacheprovider"]
    command = rest if known.python else [*pytest, "--late-policies", known.policies, *rest]
    os.execve(sys.executable, [sys.executable, *command], {**os.environ, **environment})


if __name__ == "__main__":
    _main()
