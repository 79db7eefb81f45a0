"""`python -m tests.simulation`: play many seeds, or replay one with every event.

python -m tests.simulation --seed 4711 --trace         # one, with its events
python -m tests.simulation --first 0 --count 10000     # many; failing ones are printed with the command above
"""

from __future__ import annotations

import argparse
import json
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--stop-at", type=int, default=10, help="end after so many failing seeds")
    parser.add_argument("--mutation", help="play a product with this deliberate bug")
    parser.add_argument("--tcp", action="store_true", help="over TCP, with a stager that stands alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.mutation:
        from tests.simulation.mutations import apply

        apply(options.mutation)
    from tests.simulation.engine import clean_up, run_seed

    try:
        if options.seed is not None:
            outcome = run_seed(options.seed, trace=True, tcp=options.tcp)
            print("\n".join(outcome.trace if options.trace else outcome.trace[-60:]))
            print(f"{outcome.events} events: {outcome.failure or 'all invariants hold'}")
            return int(bool(outcome.failure))
        begun, events, failures = time.perf_counter(), 0, []
        for seed in range(options.first, options.first + options.count):
            outcome = run_seed(seed, tcp=options.tcp)
            events += outcome.events
            if outcome.failure:
                failures.append([seed, outcome.failure])
                if not options.json:
                    over = " --tcp" if options.tcp else ""
                    print(
                        f"seed {seed}: {outcome.failure}\n  python -m tests.simulation --seed {seed} --trace{over}"
                    )
                if len(failures) >= options.stop_at:
                    break
        played = seed - options.first + 1
        seconds = time.perf_counter() - begun
        if options.json:
            print(
                json.dumps({"schedules": played, "events": events, "seconds": seconds, "failures": failures})
            )
        else:
            print(f"{played} schedules, {events} events, {seconds:.1f} s, {len(failures)} failed")
        return int(bool(failures))
    finally:
        clean_up()


if __name__ == "__main__":
    sys.exit(main())
