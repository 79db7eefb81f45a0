"""Coverage-guided fuzzing of one target, with atheris (not in the dev extra: Linux only, 35 MB):

    pip install atheris && python -m tests.fuzz.guided TARGET [-max_total_time=300] [libFuzzer options]

Without a target it prints their names. It starts from real inputs in `.fuzz/TARGET`, and keeps new inputs there; a
crash leaves its input in the working directory: add that to `tests/fuzz/test_parsers.py` as an example.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

from tests.fuzz.seeds import SEEDS
from tests.fuzz.targets import TARGETS, within_our_errors

_INSTRUMENTED = (
    "holdfast",
    "flusher",
    "trainer_side",
    "zipfile",
    "json",
    "pickletools",
    "torch._weights_only_unpickler",
)


def main(arguments: list[str]) -> int:
    """Fuzz until the limit."""
    if not arguments or arguments[0] not in TARGETS:
        print(f"usage: python -m tests.fuzz.guided {'|'.join(TARGETS)} [-max_total_time=SECONDS]")
        return 2 if arguments else 0
    atheris = importlib.import_module("atheris")

    name, *options = arguments
    logging.disable(logging.CRITICAL)
    corpus = Path(".fuzz") / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[name]):
        (corpus / f"seed-{number}").write_bytes(seed)
    for module in [module for module in sys.modules if module.startswith(_INSTRUMENTED)]:
        for value in list(vars(sys.modules[module]).values()):
            _instrument(atheris, value, module)
    target = TARGETS[name]

    def once(data: bytes) -> None:
        within_our_errors(target, data)

    atheris.Setup([sys.argv[0], str(corpus), "-rss_limit_mb=4096", "-timeout=20", *options], once)
    atheris.Fuzz()
    return 0


def _instrument(atheris: Any, value: object, module: str) -> None:
    """Instrument functions and methods of our own modules in place: they were imported long ago."""
    members = [value, *vars(value).values()] if isinstance(value, type) else [value]
    for member in members:
        function = getattr(member, "__func__", member)
        if hasattr(function, "__code__") and getattr(function, "__module__", None) == module:
            atheris.instrument_func(function)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
