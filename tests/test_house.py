"""House rules: maps name existing files, rooms keep to a budget, files and tests have descriptive names."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.parsed import parsed
from tests.support.plain_words import prose
from tests.test_architecture import PACKAGES, ROOT, sources

# -- maps ----------------------------------------------------------------------------------------------------------

# A line of a map: names of files, of rooms with a slash, or patterns such as `s3_*`; two blanks; a description.
MAP_LINE = re.compile(r"^((?:[\w*]+/?)(?:, [\w*]+/?)*) {2,}\S", re.MULTILINE)


def children(folder: Path) -> set[str]:
    """The rooms (`name/`) and files (`name`) that a package's map must name."""
    files = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}
    return files | {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}


def map_errors(docstring: str, there: set[str]) -> list[str]:
    """Names that a package's map must add or remove."""
    named = [name for names in MAP_LINE.findall(docstring) for name in names.split(", ")]
    missing = [one for one in sorted(there) if not any(fnmatch.fnmatchcase(one, name) for name in named)]
    gone = [name for name in named if not fnmatch.filter(there, name)]
    return [f"add {one}" for one in missing] + [f"remove {name}" for name in gone]


# A room with more files than this has a map; in a smaller one the first lines of the files are enough.
UNMAPPED_MAX = 9


def rooms() -> list[str]:
    """The packages, and the rooms in them."""
    folders = [ROOT / package for package in PACKAGES]
    folders += [path.parent for folder in folders for path in sorted(folder.glob("*/__init__.py"))]
    return [str(folder.relative_to(ROOT)) for folder in folders]


@pytest.mark.parametrize("room", rooms())
def test_a_map_names_all_rooms_and_files(room: str) -> None:
    docstring = ast.get_docstring(parsed(ROOT / room / "__init__.py")) or ""
    there = children(ROOT / room)
    errors = map_errors(docstring, there)
    if room in PACKAGES or len(there) > UNMAPPED_MAX:
        assert errors == [], f"in the docstring of {room}/__init__.py"


# -- budgets -------------------------------------------------------------------------------------------------------

# Limits of lines per room, including its folders: its size, rounded up to the next 50. A room that grows needs a new
# limit here, on purpose; one that has shrunk by more than GIVEN_BACK_AT lines lowers its limit.
BUDGETS = {
    "flusher": 5900,
    "holdfast": 2600,
    "holdfast/checkpoints": 2900,
    "holdfast/command": 700,
    "holdfast/image": 2550,
    "holdfast/integrations": 150,
    "holdfast/net": 800,
    "holdfast/notices": 800,
    "holdfast/notify": 550,
    "holdfast/policy": 400,
    "holdfast/ring": 1900,
    "holdfast/store": 3600,
    "holdfast/telemetry": 2350,
    "holdfast/wire": 1850,
    "operator_side": 200,
    "operator_side/cluster": 900,
    "operator_side/commands": 4150,
    "operator_side/doctor": 650,
    "operator_side/drill": 1450,
    "operator_side/live": 400,
    "operator_side/page": 250,
    "operator_side/report": 1350,
    "operator_side/simulate": 1750,
    "operator_side/status": 1100,
    "operator_side/supervise": 3000,
    "stager": 5150,
    "stager/session": 1500,
    "trainer_side": 2300,
    "trainer_side/convert": 1750,
    "trainer_side/data": 950,
    "trainer_side/frameworks": 1100,
    "trainer_side/link": 2500,
    "trainer_side/notice": 1100,
    "trainer_side/pace": 550,
    "trainer_side/proof": 750,
    "trainer_side/ranks": 2950,
    "trainer_side/restore": 6750,
    "trainer_side/save": 5800,
    "trainer_side/state": 4700,
    "trainer_side/tiers": 4900,
    "trainer_side/trackers": 550,
}
PRODUCT_LINES_MAX = 84_600
ROUNDED_TO, GIVEN_BACK_AT = 50, 250


def room_of(path: Path) -> str:
    """The first folder inside the package, or the package itself."""
    return "/".join(path.relative_to(ROOT).parent.parts[:2])


def lines_by_room() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in sources():
        found[room_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
    return found


def all_defined(tree: ast.Module) -> Iterator[str]:
    """Names of all functions, methods and classes."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return (node.name for node in ast.walk(tree) if isinstance(node, kinds))


def test_a_room_keeps_to_its_budget() -> None:
    found = lines_by_room()
    wrong = {
        room: f"{found[room]} lines, budget {BUDGETS.get(room, 0)}: write {-(-found[room] // ROUNDED_TO) * ROUNDED_TO}"
        for room in sorted({*found, *BUDGETS})
        if not 0 <= BUDGETS.get(room, 0) - found[room] <= GIVEN_BACK_AT
    }
    assert wrong == {}
    assert found.total() <= PRODUCT_LINES_MAX


# -- names ---------------------------------------------------------------------------------------------------------

# Files that share no word with their definitions, by the reason. Remove a file that complies or is gone.
NAMED_OTHERWISE = {
    "a program, an entry point, or the one file of a package that starts MPI": [
        "flusher/command.py",
        "operator_side/supervise/rank.py",
        "stager/checks.py",
        "stager/command.py",
        "stager/doctor_job.py",
        "trainer_side/checks.py",
        "trainer_side/ranks/mpi.py",
    ],
    "public: named after the framework that its users look for": [
        "trainer_side/frameworks/accelerate.py",
        "trainer_side/frameworks/lightning.py",
        "trainer_side/frameworks/torchtitan.py",
        "trainer_side/frameworks/trackers.py",
        "trainer_side/frameworks/transformers.py",
    ],
    "functions on one subject, which the file names": [
        "flusher/lifetime.py",
        "flusher/recovery.py",
        "holdfast/command/output.py",
        "holdfast/extras.py",
        "holdfast/store/posix_io.py",
        "holdfast/supervised.py",
        "holdfast/telemetry/tracing.py",
        "operator_side/commands/options.py",
        "operator_side/commands/simulate_output.py",
        "operator_side/commands/status_output.py",
        "operator_side/doctor/machine.py",
        "operator_side/report/sentences.py",
        "operator_side/page/words.py",
        "operator_side/simulate/study_pictures.py",
        "trainer_side/convert/plain_values.py",
        "trainer_side/ranks/uncaught.py",
        "trainer_side/restore/two_values.py",
        "trainer_side/state/accelerator.py",
        "trainer_side/state/per_rank_blob.py",
        "trainer_side/tiers/first_touch.py",
    ],
    "values of one kind, which the file names": [
        "flusher/steps.py",
        "holdfast/net/handshake.py",
        "holdfast/notices/messages.py",
        "holdfast/ring/doorbell.py",
        "holdfast/ring/remains.py",
        "holdfast/store/base.py",
        "holdfast/wire/state_messages.py",
        "operator_side/cluster/ladder.py",
        "operator_side/simulate/scale.py",
        "operator_side/simulate/study.py",
        "operator_side/supervise/supervisor_messages.py",
        "trainer_side/convert/dcp_parts.py",
        "trainer_side/restore/choice.py",
        "trainer_side/state/tree.py",
        "trainer_side/tiers/slot_format.py",
    ],
    "to be renamed: the file and its class have different names for one thing": [
        "trainer_side/ranks/deadlines.py",
        "trainer_side/restore/inventory.py",
    ],
}
ENDINGS = (
    "ations",
    "ation",
    "ings",
    "ing",
    "ions",
    "ion",
    "ers",
    "er",
    "ors",
    "or",
    "ies",
    "ed",
    "es",
    "al",
    "s",
    "e",
    "y",
)


def stem(word: str) -> str:
    """A word without its ending, so that `pickling` is `Pickle`, and `entries` is `Entry`."""
    word = word.lower()
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) >= len(ending) + 3:
            return word.removesuffix(ending)
    return word


def words(name: str) -> set[str]:
    """The stems of the words in `snake_case` or `CamelCase`."""
    return {stem(word) for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def defined(tree: ast.Module) -> list[str]:
    """Public classes and functions of a file."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"]


def is_named_after(file: str, names: list[str]) -> bool:
    """Whether a file shares a word with a name that it defines, or defines none."""
    pairs = [(one, other) for name in names for one in words(file) for other in words(name)]
    return not names or any(
        one == other
        or (
            min(len(one), len(other)) >= 4
            and one.startswith(other[: len(one)])
            and other.startswith(one[: len(other)])
        )
        for one, other in pairs
    )


def test_a_file_is_named_after_something_that_it_defines() -> None:
    wrong = {
        str(path.relative_to(ROOT)): defined(parsed(path))
        for path in sources()
        if not path.stem.startswith("__") and not is_named_after(path.stem, defined(parsed(path)))
    }
    listed = {path for paths in NAMED_OTHERWISE.values() for path in paths}
    assert {path: names for path, names in wrong.items() if path not in listed} == {}, (
        "rename the file or a class"
    )
    assert sorted(listed - wrong.keys()) == [], "these comply or are gone: take them off the list"


# -- names of functions and classes --------------------------------------------------------------------------------

# Words that do not say what happens, and the words for it: poll, check; handle; send, report, log; request; connect.
VAGUE = re.compile(
    r"(?:^|_)(?:look|looks|looked|hear|hears|heard|tell|tells|told|say|says|said|learn|obey|mend|mends|wish|wishes|meet|"
    r"gone|stood|anew)(?:_|$)"
)
NOT_VAGUE = {"tell", "_look_up_in_store"}  # of a file object; an idiom


def test_a_definition_has_a_plain_name() -> None:
    vague = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        for name in all_defined(parsed(path))
        if name not in NOT_VAGUE and VAGUE.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    }
    assert vague == set()


# -- transports ----------------------------------------------------------------------------------------------------

NEUTRAL = (
    *("trainer_side/save", "trainer_side/state", "trainer_side/link", "trainer_side/restore"),
    *("stager/session", "holdfast/image", "holdfast/checkpoints", "holdfast/ring"),
)
TRANSPORT = re.compile(r"\b(?:MPI|mpi|mpirun|mpi4py|TCP|tcp|torchrun)\b")
PURE = re.compile(r"\b[Nn]o (?:torch, no )?MPI\b")  # the docstring of a pure core says so


def transport_words(root: Path, room: str) -> Iterator[str]:
    for path in sorted((root / room).rglob("*.py")):
        name = str(path.relative_to(root))
        for place in prose(path.read_text(encoding="utf-8"), name):
            if TRANSPORT.search(PURE.sub("", place.text)):
                yield f"{name}:{place.line}: {' '.join(place.text.split())[:100]}"


@pytest.mark.parametrize("room", NEUTRAL)
def test_a_room_without_a_transport_names_none(room: str) -> None:
    assert list(transport_words(ROOT, room)) == [], "say `the transport`, `the stager`, or `the launcher`"


# -- names of tests ------------------------------------------------------------------------------------------------

# A name begins with the unit under test. A pronoun names no unit, and a single word names no behaviour.
UNTOLD = re.compile(
    r"test_(?:it|its|they|them|this|that|these|those|there|what|whatever|who|whoever|which|how|why|one|ones|none|of|"
    r"nothing|nobody|everything|everybody|anything|neither|nor|so|as|others|all_(?:of|that|else|hear))_|test_[^_]+$"
)


def test_a_test_is_named_after_its_unit_and_behaviour() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)  # used once, so not cached
    names = {name for tree in trees for name in defined(tree) if name.startswith("test_")}
    assert len(names) > 3000
    assert sorted(filter(UNTOLD.match, names)) == []


# -- tensors of ours -------------------------------------------------------------------------------------------------

_MAKERS = {"empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn"}


def test_new_tensors_name_their_device() -> None:
    """Otherwise a script's torch.set_default_device would put them on another device."""
    unnamed = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((ROOT / "trainer_side").rglob("*.py"))
        for call in ast.walk(parsed(path))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in _MAKERS) == ("torch", True)
        and not any(keyword.arg == "device" for keyword in call.keywords)
    ]
    assert unnamed == []
