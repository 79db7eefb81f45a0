"""Nothing here installs holdfast by its bare name: on the package index that would be a stranger's package."""

from __future__ import annotations

import itertools
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from holdfast.extras import install_line

ROOT = Path(__file__).resolve().parents[2]
OURS = "holdfast"
COMMAND = re.compile(
    r"\b(?:pip[\d.]*\s+(?:install|download|wheel)|uv\s+(?:add|tool\s+install|pip\s+install)|pipx\s+(?:install|run)|uvx)\b([^\n]*)"
)
END_OF_COMMAND = re.compile(r"[`#;|&]|\.(?:\s|$)")
# A requirement without a place to take it from, which `@ URL` would be.
BARE = re.compile(rf"{OURS}(?:\[[^\]]*\])?(?:[<>=!~].*)?", re.IGNORECASE)
# The same as the value of a variable or a field, which a command takes from there.
VALUE = re.compile(rf"""["']{OURS}(?:\[[\w, ]*\]|\s*[<>=!~]=)[^"'@\n]*["']""", re.IGNORECASE)


def bare_installs(text: str) -> list[str]:
    """The commands and values that name holdfast, and no place to take it from."""
    joined = re.sub(r"\\+\n\s*", " ", text)  # a line that a backslash joins to the next one
    found = [match[0] for match in VALUE.finditer(joined)]
    for command in COMMAND.finditer(joined):
        words = [word.strip("\"',") for word in END_OF_COMMAND.split(command[1])[0].split()]
        for word, after in itertools.pairwise([*words, ""]):
            if BARE.fullmatch(word) and after != "@":
                found.append(command[0])
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        "pip install {}",
        "pip install '{}[trainer]'",
        'python -m pip install --upgrade "{}[trainer,openmpi]==0.2.0"',
        "pip3.11 install -qq torch {}",
        "RUN pip install --no-cache-dir \\\n    {}[stager]",
        "uv pip install --python ~/venv '{}[torchrun]'",
        "uv add {}",
        "pipx install {}",
        "pip download {}>=0.2",
        "is missing; `pip install {}[openmpi]`, or",
        'default     = "{}[trainer,openmpi]"',
        'package = "{}==0.1.0"',
    ],
)
def test_a_bare_name_is_seen(wrong: str) -> None:
    assert bare_installs(f"before\n{wrong.format(OURS)}\nafter") != []


@pytest.mark.parametrize(
    "right",
    [
        "pip install '{}[torchrun] @ git+https://git.example/YOU/{}'",
        "pip install ./dist/{}-0.2.0-py3-none-any.whl",
        "pip install '.[trainer]'  # {} itself",
        "uv pip install --python ~/{} torch",
        "`pip install torch`, then start {}",
        'package = "{}[trainer] @ https://example.com/{}-0.1.0-py3-none-any.whl"',
        "(needs {}[trainer])",
    ],
)
def test_a_place_of_ones_own_is_none(right: str) -> None:
    assert bare_installs(right.replace("{}", OURS)) == []


def test_no_tracked_file_installs_a_stranger_s_package() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    assert len(paths) > 1000
    texts = {
        path: path.read_text(errors="replace") for path in paths if path.is_file() and not path.is_symlink()
    }
    wrong = {str(path.relative_to(ROOT)): bare_installs(text) for path, text in texts.items()}
    assert {path: found for path, found in wrong.items() if found} == {}


def test_a_message_names_the_packages_that_an_extra_brings() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("trainer", "stager", "openmpi", "frameworks", "otel"):
        assert install_line(name) == " ".join(["pip install", *(f"'{one}'" for one in extras[name])])
    assert install_line("trainer", "stager") == install_line("trainer"), "what both bring is named once"
