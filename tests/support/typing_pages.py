"""Which commands of the pages are typed by a test, how a page's names are those of this machine, and what is left out.

    page ─► Shown lines ─► NOT_TYPED? ─yes─► left out, with its reason
                               │no
                               └─► SCENE (the page's names ─► the scene's) ─► bash, in order, in a folder for each page

What no entry of `NOT_TYPED` begins like is typed: docs/tutorial.md by tests/soak/test_tutorial.py, docs/cli.md by
tests/soak/test_reference_page.py, all others by tests/pages/test_pages.py.
"""

from __future__ import annotations

import re

from tests.pages.test_documents import pages
from tests.support.doc_commands import ELSEWHERE, Shown, shown

__all__ = [
    "EXIT_CODES",
    "NOT_TYPED",
    "REFERENCE",
    "SCENE",
    "TUTORIAL",
    "TYPED_ONCE",
    "as_typed",
    "entry_for",
    "exit_code_of",
    "plan",
    "typed_of",
]

TUTORIAL = "docs/tutorial.md"
REFERENCE = "docs/cli.md"
_OWN_TARGET = "a test run of its own: "
_ENVIRONMENT = "changes the environment that the tests run in"
_DRILL = (
    "a minute and more each; the tutorial's drill is typed, tests/integration/test_drill.py plays notices"
)
_NOTIFIES = "posts to a service; tests/integration/test_run.py posts to a server of its own"
# A command that begins so is not typed, for this reason. What runs it instead is said, if something does.
NOT_TYPED = {
    **{f"{program} ": reason for program, reason in ELSEWHERE.items()},
    ". .venv/bin/activate": "that environment comes first in the PATH already",
    "make setup": _ENVIRONMENT,
    "pip install": _ENVIRONMENT,
    "holdfast stager --store ": "stands until told to stop; tests/integration/test_standing_stager.py starts some",
    "holdfast status --web": "serves until Ctrl-C; tests/integration/test_watched_job.py browses it",
    "holdfast ls /tmp/run": "after lines that are not typed: another machine's store",
    "HOLDFAST_STAGER=": "a job of its own; tests/integration/test_own_stager.py and test_standing_stager.py start such",
    "holdfast run --launcher torchrun": "stands for minutes; tests/integration/test_run_torchrun.py runs it",
    "torchrun ": "several machines; tests/integration/test_torchrun.py starts jobs on this one",
    "make lint": "CI runs it before the tests",
    "make types": "CI runs it beside the tests",
    "make ci": _OWN_TARGET + "the one that this test is of",
    "make test": _OWN_TARGET + "what CI runs before this one",
    "make check": _OWN_TARGET + "the one that this test is of",
    "make rest": _OWN_TARGET + "the one that this test is of, or a part of it",
    "make floor": _OWN_TARGET + "another torch, of gigabytes where no index has its CPU build",
    "make soak": _OWN_TARGET + "more than an hour",
    "SIMULATION_SCHEDULES=200000": _OWN_TARGET + "a night of it",
    "make chaos": _OWN_TARGET + "tests/chaos, of which `make check` runs a part",
    "make infra": _OWN_TARGET + "tests/infra, which `make check` runs too; installs packages as root",
    "make pm": _OWN_TARGET + "a power cut in QEMU; installs packages as root",
    "make hosts": _OWN_TARGET + "minutes with network namespaces; installs packages as root",
    "make slurm": _OWN_TARGET + "minutes with a Slurm on several hosts; installs packages as root",
    "make nfs": _OWN_TARGET + "a power cut in QEMU; installs packages as root",
    "make compose": _OWN_TARGET + "tests/compose, which `make soak` runs too; installs packages as root",
    "make demo": "two to three minutes; `make soak` plays it (tests/soak/test_demo.py)",
    "make bench": "ten minutes and more; `make soak` runs a small one (tests/soak/test_benchmarks.py)",
    "make gpu": "needs a device; tests/gpu/test_device_rehearsal.py plays it on one that is not there",
    "python -m tests.late": "minutes; tests/gpu/test_on_the_late_device.py runs tests by it",
    "make trackers": _OWN_TARGET + "downloads three libraries",
    "make docs": "tests/pages/test_site.py builds that site, and reads it",
    "make figures": "writes into docs/; tests/pages/test_benchmarks_document.py compares what it would write",
    "python -m benchmarks reality": "many minutes; `make soak` plays it (tests/soak/test_reality.py)",
    "REALITY_TRACE=": "many minutes; `make soak` plays it (tests/soak/test_reality.py)",
    'eval "$(holdfast completion zsh)"': "in zsh; tests/integration/test_completion.py asks each shell that is there",
    "holdfast rank ": "a job of mpirun or torchrun around it; tests/integration/test_exit_codes_of_jobs.py runs them",
    "holdfast run -n 8 --cluster": "needs machines that can be reached; moto's cannot",
    "export HOLDFAST_NOTIFY": _NOTIFIES,
    "holdfast run -n 8 --notify": _NOTIFIES,
    "holdfast stager --notify": "would tell people of it; tests/integration/test_notify.py does it",
    "holdfast drill -n 2 --kills 3": _DRILL,
    "holdfast drill -n 2 --with notice": _DRILL,
    "holdfast rewind s3://bucket/run --to": "changes the run of all pages; tests/integration/test_rewind.py does it",
    "python -m tests.fuzz.guided layout": "ten minutes, with a package that is not in the dev extra",
}
# What a name in the pages means here: pattern ─► what is typed. `{page}` is the page's folder (page_scene.py).
# s3://bucket/run is there as it stands, on a server of this machine, and so are files such as trace.csv.
SCENE = {
    r"(?<![\w.])/mnt/": "{page}/mnt/",  # no root's folder
    r"@(?:123|1000)\b": "@29",  # a step that the scene's training has left
    r"--to 10000\b": "--to 29",
    r"^ssh (?:-t )?stager ": "",  # the reader is on the stager's machine already
    r"(?<=\s)-n (?:8|16)\b|(?<=^mpirun )…": "-n 1",  # ranks; the README's two jobs have two
    r"--min-ranks \d+": "--min-ranks 1",
    r"\bring_bytes=8GiB\b": "ring_bytes=128MiB",
    r"--ring-bytes 8GiB\b": "--ring-bytes 128MiB",
    # A model that trains in seconds, and some steps of it.
    r"(?<=python examples/train_gpt\.py)(?=$| :)": " --layers 1 --width 64 --steps 40 --every 10",
    r"\bs3://bucket/new\b": "s3://bucket/new-{name}",  # each page is read by somebody else
    r"\bsubnet-0b\b": "{subnet}",  # of moto's EC2
    # Moto's machines have addresses that lead nowhere: `hosts` goes on to name this machine.
    r"^(holdfast cluster up .*)--hostfile hosts\b": r"\1--hostfile raised-hosts",
    r"\bcollector:4318\b": "127.0.0.1:9",  # where nobody takes spans: no checkpoint waits for that
    r"--count 1000\b": "--count 20",
    # It would stay for ever: it is told to end, as a service is, once it has the run.
    r"^(holdfast flusher .*)$": r"HOLDFAST_EVENTS=ready \1 & "
    r"until grep -qs flusher_ready ready; do sleep 0.2; done; kill $!; wait $!",
}
# Where a page says itself that a command does not end with 0.
EXIT_CODES = {"python -m tests.simulation --mutation": 1}
# A job of many seconds, which no page needs for its next line, is typed on the first page that has it.
TYPED_ONCE = ("holdfast doctor", "holdfast run", "holdfast simulate", "mpirun ")


def entry_for(line: Shown) -> str:
    """What in `NOT_TYPED` the line begins like; empty if it is to be typed."""
    return next((beginning for beginning in NOT_TYPED if line.text.startswith(beginning)), "")


def exit_code_of(line: Shown) -> int:
    """How it is to end."""
    return next((code for beginning, code in EXIT_CODES.items() if line.text.startswith(beginning)), 0)


def typed_of(page: str) -> list[Shown]:
    """The lines of a page that a test types."""
    lines = [line for line in shown(page) if not entry_for(line)]
    for line in lines:
        # A target may install packages, or run for hours.
        assert not line.text.startswith("make "), f"{line}: a target of make needs an entry in NOT_TYPED"
    return lines


def as_typed(text: str, names: dict[str, str]) -> str:
    """The same line, with the scene's names for those of the pages."""
    for pattern, meant in SCENE.items():
        for name, value in names.items():
            meant = meant.replace(f"{{{name}}}", value)
        text = re.sub(pattern, meant, text)
    return text


def plan() -> dict[str, list[Shown]]:
    """What is typed of each page but the tutorial; of `TYPED_ONCE` what no page before has had."""
    seen: set[str] = set()
    found: dict[str, list[Shown]] = {}
    # What the reference repeats of another page is typed with that one, by `make rest`.
    in_order = sorted((page for page in pages() if page != TUTORIAL), key=lambda page: page == REFERENCE)
    for line in (line for page in in_order for line in typed_of(page)):
        if not line.text.startswith(TYPED_ONCE) or line.text not in seen:
            found.setdefault(line.page, []).append(line)
        seen.add(line.text)
    return found
