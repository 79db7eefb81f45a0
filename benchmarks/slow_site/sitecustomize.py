"""On PYTHONPATH of a job: each of its flushers writes its files at a limited rate; nothing else of it is changed."""

import os
import sys

if "flusher" in sys.orig_argv and "BENCH_BYTES_PER_SECOND" in os.environ:
    from benchmarks.slow_store import limit

    limit(float(os.environ["BENCH_BYTES_PER_SECOND"]), os.environ["BENCH_SHARE"])
