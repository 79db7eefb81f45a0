"""No file installs holdfast by its bare name: on the package index that would be a stranger's package."""

from __future__ import annotations

import itertools
import re
import subprocess
import tomllib
from pathlib import Path

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
