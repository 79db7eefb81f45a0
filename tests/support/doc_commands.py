"""Commands shown in the docs: found line by line, and checked by the parsers of their programs without being run.

    page ─► blocks tagged `sh` ─► Shown: page, line, text ─► words of each simple command ─► the check of its program
    page ─► spans in code type that begin with `holdfast` ─► the same check, where arguments may be missing

A program has a check in `PROGRAMS`, or a reason in `ELSEWHERE` why its commands cannot be checked on a machine that
builds holdfast, or is one of the `PLAIN` ones that every shell has. All other programs are refused.
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click

from holdfast.command.cli import cli
from holdfast.config import FlusherConfig, StagerConfig
from holdfast.errors import ConfigError
from tests.support.job import REPOSITORY

__all__ = [
    "ELSEWHERE",
    "LANGUAGES",
    "PLAIN",
    "PROGRAMS",
    "Fence",
    "Shown",
    "fences",
    "shown",
    "spoken",
    "why_not",
    "why_not_spoken",
]

LANGUAGES = {"", "text", "sh", "python", "json", "toml", "yaml", "diff"}
ELSEWHERE = {
    "aws": "needs an account of AWS",
    "terraform": "needs providers and an account of AWS; tests/infra plays what it can where terraform is installed",
    "sbatch": "needs Slurm; tests/slurm submits the script to one, where it is installed (make slurm)",
    "docker": "needs a daemon; tests/compose runs docker-compose.yml in one, where it can be started (make compose)",
    "kubectl": "needs a cluster; tests/infra checks the manifests by published models",
    "sky": "needs an account of a cloud, or a cluster; tests/infra has SkyPilot take the files and the lines",
    "sudo": "on the stager's machine on AWS",
    "journalctl": "needs systemd, on the stager's machine on AWS",
}
PLAIN = {"cd", "chmod", "cp", "grep", "jq", "patch", "pkill", "sleep", "tail", "test", "wait", "."}
_KEYWORDS = {"until", "while", "do", "done", "if", "then", "fi"}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_REDIRECTION = re.compile(r"\s\d?(?:>>?|<)(?:&\d|\s*[^\s&|;]+)")
_SUBSTITUTION = re.compile(r"\$\((.*?)\)")
_OF_THE_TREE = re.compile(r"(?:benchmarks|docs|examples|infra|tests)/[\w./-]+")
_MPIRUN = {
    "--with-ft": 1,
    "-n": 1,
    "--bind-to": 1,
    "--oversubscribe": 0,
}  # options, and how many words follow each


class Fence(NamedTuple):
    """A block of a page; `number` is the line number of its first line between the fences, from 1."""

    page: str
    number: int
    language: str
    lines: tuple[str, ...]


class Shown(NamedTuple):
    """A line of a block tagged `sh`, joined with its continuation lines, without its comment."""

    page: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.number}: {self.text}"


class _WrongError(Exception):
    """The reason why a command is wrong."""


def fences(page: str) -> Iterator[Fence]:
    """The blocks of a page, named by its path in the repository."""
    begun: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate((REPOSITORY / page).read_text(encoding="utf-8").splitlines(), 1):
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif begun is None:
            begun, lines = (number + 1, line.strip().lstrip("`")), []
        else:
            yield Fence(page, *begun, tuple(lines))
            begun = None
    assert begun is None, f"{page}: a block does not end"


def shown(page: str) -> Iterator[Shown]:
    """The lines that a reader should type."""
    for fence in fences(page):
        if fence.language != "sh":
            continue
        begun, before = fence.number, ""
        for number, line in enumerate(fence.lines, fence.number):
            begun = begun if before else number
            if line.endswith("\\"):
                before += line[:-1] + " "
                continue
            text = (before + line).partition(" #")[0].strip()
            before = ""
            if text and not text.startswith("#"):
                yield Shown(page, begun, text)


def spoken(page: str) -> Iterator[str]:
    """Commands in the prose of a page; `holdfast cluster up|status|down` gives three."""
    prose = re.sub(
        r"^```.*?^```$", "", (REPOSITORY / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for span in re.findall(r"`(holdfast [^`]+)`", prose):
        words = [word.split("|") for word in span.split()]
        yield from map(" ".join, itertools.product(*words))


def why_not(text: str) -> str:
    """Return the mistake in a line of shell, or "". Files that it names must lie in the working directory."""
    try:
        _check_line(text)
    except _WrongError as error:
        return str(error)
    return ""


def why_not_spoken(text: str) -> str:
    """As `why_not`, for a command in prose, which need not have all its arguments."""
    try:
        _holdfast(shlex.split(text.replace("…", "1"))[1:], whole=False)
    except _WrongError as error:
        return str(error)
    return ""


def _check_line(text: str) -> None:
    for inner in _SUBSTITUTION.findall(text):
        _check_line(inner)
    for words in _simple_commands(text):
        _check(words)


def _simple_commands(text: str) -> Iterator[list[str]]:
    """Split at `|`, `&&`, `;` and similar; drop redirections."""
    lexer = shlex.shlex(_REDIRECTION.sub(" ", text), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("();<>|&"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def _check(words: Sequence[str]) -> None:
    words = [word for word in words if word != "…"]
    while words and (words[0] in _KEYWORDS or _ASSIGNMENT.fullmatch(words[0])):
        words = words[1:]
    if not words:
        return
    for word in words:
        if _OF_THE_TREE.fullmatch(word) and not (REPOSITORY / word).exists():
            raise _WrongError(f"{word} is not in the tree")
    program, *rest = words
    if program in PROGRAMS:
        PROGRAMS[program](rest)
    elif program not in ELSEWHERE and program not in PLAIN:
        raise _WrongError(
            f"{program}: unknown; it needs a check, or a reason, in tests/support/doc_commands.py"
        )


def _holdfast(words: Sequence[str], *, whole: bool = True) -> None:
    """Check commands, options, types of values and arguments by click, settings by pydantic. Nothing is invoked."""
    try:
        context = cli.make_context("holdfast", list(words))
        while isinstance(context.command, click.Group):
            rest = [*context._protected_args, *context.args]
            name, command, rest = context.command.resolve_command(context, rest)
            assert command is not None
            context = command.make_context(name, rest, parent=context)
    except click.exceptions.Exit:  # --help, --version
        return
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError) as error:
        if whole:
            raise _WrongError(error.format_message()) from error
        return
    except click.BadOptionUsage as error:
        if whole or "requires an argument" not in error.format_message():
            raise _WrongError(error.format_message()) from error
        return
    except (click.UsageError, ConfigError) as error:
        raise _WrongError(str(error)) from error
    match context.command.name:
        case "run" | "drill":
            given = dict(pair.split("=", 1) for pair in context.params["settings"])
            _settings(StagerConfig, {"store": "/mnt/run", **given})
            _check(context.params["command"])
        case "rank":
            _check(context.params["command"])
        case "stager" if whole and not context.params["new_key"]:
            given = {name: value for name, value in context.params.items() if name not in _NO_SETTINGS}
            _settings(StagerConfig, given)
        case "flusher" if whole:
            _settings(FlusherConfig, context.params)


_NO_SETTINGS = frozenset(
    {"new_key", "once", "own", "notify", "notify_command"}
)  # options of `holdfast stager`


def _settings(role: type[StagerConfig | FlusherConfig], given: Mapping[str, Any]) -> None:
    """Check that the role has these settings and accepts their values together."""
    if unknown := given.keys() - role.model_fields.keys():
        raise _WrongError(f"no setting {', '.join(sorted(unknown))}")
    try:
        role.from_sources(**given)
    except ConfigError as error:
        raise _WrongError(str(error)) from error


def _make(words: Sequence[str]) -> None:
    makefile = _text("Makefile")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and f"$({name})" not in makefile:
            raise _WrongError(f"make: no variable {name}")
        if not equals and name not in targets:
            raise _WrongError(f"make: no target {name}")


def _mpirun(words: Sequence[str]) -> None:
    for is_colon, part in itertools.groupby(words, lambda word: word == ":"):
        if is_colon:
            continue
        rest = list(part)
        while rest and rest[0].startswith("-"):
            if rest[0] not in _MPIRUN:
                raise _WrongError(f"mpirun: option {rest[0]} is not among those that are known to work here")
            rest = rest[1 + _MPIRUN[rest[0]] :]
        if not rest:
            raise _WrongError("mpirun: nothing to start")
        _check(rest)


def _torchrun(words: Sequence[str]) -> None:
    from torch.distributed.run import get_args_parser

    try:
        get_args_parser().parse_args(list(words))
    except SystemExit as error:
        raise _WrongError("torchrun: its own parser refuses that") from error


def _pip(words: Sequence[str]) -> None:
    """Check extras of holdfast only; tests/unit/test_installs.py checks how pages install holdfast itself."""
    extras = tomllib.loads(_text("pyproject.toml"))["project"]["optional-dependencies"]
    for word in words:
        if found := re.fullmatch(r"(?:holdfast|\.)\[([\w,]+)\](?: @ \S+)?", word):
            for extra in found[1].split(","):
                if extra not in extras:
                    raise _WrongError(f"pip: no extra {extra}")


def _ssh(words: Sequence[str]) -> None:
    rest = list(itertools.dropwhile(lambda word: word.startswith("-"), words))
    _check(rest[1:])  # behind the host


def _nothing_more(_: Sequence[str]) -> None:
    """Accept: `$(…)` is checked by itself, variables by test_documents.py, scripts by typing them."""


@functools.cache
def _text(name: str) -> str:
    path = REPOSITORY / name
    if not path.exists():
        raise _WrongError(f"{name} is not in the tree")
    return path.read_text(encoding="utf-8")


PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    "holdfast": _holdfast,
    "make": _make,
    "mpirun": _mpirun,
    "torchrun": _torchrun,
    "python": _nothing_more,
    "pip": _pip,
    "ssh": _ssh,
    "eval": _nothing_more,
    "export": _nothing_more,
}
