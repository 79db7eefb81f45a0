"""Names in pages and docstrings exist: files, tests, headings, settings, snippets. Commands: test_doc_commands."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import FlusherConfig, StagerConfig, TrainerConfig

ROOT = Path(__file__).resolve().parents[2]
# Files that a run, torch or a user makes: named in the pages, but not in the tree.
MADE = {
    "archive/",
    "data.pkl",
    "holdfast.toml",
    "step-000000123.json",
    ".holdfast/",
    ".holdfast/tmp/",
    ".fuzz/",
    ".holdfast/writer-NNNNNN.json",
    "run_prefix/cluster/",
    "slices/",
    "terraform-output.json",
    "trainer_state.json",
    ".wheels/",
    "NAME.json",
}
OPTIONAL = {"torchdata"}  # packages that users may have, but this environment may lack
FILE = re.compile(r"\.?[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|sh|toml|yml|md|tf|c|json|pkl))")
VARIABLES_BESIDE_SETTINGS = {
    "HOLDFAST_DOLLARS_PER_HOUR",
    "HOLDFAST_CONFIG",
    "HOLDFAST_RUN_ATTEMPT",
    "HOLDFAST_NOTIFY",
    "HOLDFAST_EVENT",
    "HOLDFAST_TEXT",
    "HOLDFAST_AZURE_METADATA_URL",
    "HOLDFAST_TEST_NFS",
    "HOLDFAST_TEST_PM",
}


@functools.cache
def files() -> frozenset[str]:
    """Return the files that git tracks or would track; all files if the tree is not a checkout."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\n")
    found = {name for name in listed if name and (ROOT / name).exists()}
    return frozenset(
        found or {str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in path.parts}
    )


@functools.cache
def folders() -> frozenset[str]:
    return frozenset(str(parent) + "/" for name in files() for parent in Path(name).parents)


@functools.cache
def pages() -> list[str]:
    return sorted(name for name in files() if name.endswith(".md") and not (ROOT / name).is_symlink())


@functools.cache
def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)
    return [content for name, content in fences if name == language]


def spans(page: str) -> Iterator[str]:
    """Yield the text of inline code, outside blocks."""
    for span in re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text(page), flags=re.DOTALL | re.MULTILINE)
    ):
        yield from (word.strip(",;:()") for word in span.split())


def is_there(name: str, page: str) -> bool:
    """Whether a file exists by its path, by its path below some folder, or relative to the page."""
    known = folders() if name.endswith("/") else files()
    beside = str(Path(page).parent / name) + ("/" if name.endswith("/") else "")
    return name in known or beside in known or any(one.endswith("/" + name) for one in known)


def test_links_lead_to_something() -> None:
    missing = []
    for page in pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
            if target.startswith("http"):
                continue
            path, _, heading = target.partition("#")
            led_to = (ROOT / page).parent / path if path else ROOT / page
            if not led_to.exists() or (heading and heading not in headings(led_to)):
                missing.append(f"{page}: {target}")
    assert not missing, "\n".join(missing)


@functools.cache
def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_files_that_pages_name_are_in_the_tree() -> None:
    missing = [
        f"{page}: {name}"
        for page in pages()
        for name in sorted({word for word in spans(page) if FILE.fullmatch(word)} - MADE)
        if not is_there(name, page)
    ]
    assert not missing, "\n".join(missing)


def test_files_that_the_source_names_are_in_the_tree() -> None:
    beginning = r"(?:trainer_side|stager|flusher|holdfast|tests|benchmarks|infra|docs|examples)"
    path = re.compile(rf"(?<![\w./-]){beginning}/[\w/.-]*\.(?:py|md|sh|c|tf|yml)\b")
    missing = {
        f"{source}: {name}"
        for source in files()
        if source.endswith((".py", ".toml", ".sh", ".yml", "Makefile"))
        and source != "tests/pages/test_documents.py"
        for name in path.findall(text(source))
        if not is_there(name, source)
    }
    assert not missing


def test_tests_that_pages_name_are_there() -> None:
    missing = [
        f"{page}: {word}"
        for page in pages()
        for word in sorted(set(re.findall(r"\btest_\w+", text(page))) - all_tests())
        if f"{word}.py" not in text(page)
    ]
    assert not missing, "\n".join(missing)


@functools.cache
def all_tests() -> frozenset[str]:
    sources = "\n".join(text(name) for name in files() if name.startswith("tests/") and name.endswith(".py"))
    return frozenset(re.findall(r"\bdef (test_\w+)", sources)) | frozenset(
        Path(name).stem for name in files() if name.startswith("tests/")
    )


def test_variables_and_settings_that_pages_name_exist() -> None:
    fields = {name for role in (FlusherConfig, StagerConfig, TrainerConfig) for name in role.model_fields}
    variables = {f"HOLDFAST_{name.upper()}" for name in fields} | VARIABLES_BESIDE_SETTINGS
    named = {word for page in pages() for word in re.findall(r"\bHOLDFAST_[A-Z_]*[A-Z]\b", text(page))}
    assert named <= variables
    assert named, "the pattern finds nothing"


def test_snippets_of_python_have_names_that_exist() -> None:
    wrong = [
        f"{page}: {line}"
        for page in pages()
        for block in blocks(page, "python")
        for line in not_importable(block)
    ]
    assert not wrong, "\n".join(wrong)


def not_importable(block: str) -> Iterator[str]:
    """Yield the import lines that fail, except those of packages that this environment may lack."""
    tree: Any = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            root = node.module.partition(".")[0]
            if root in OPTIONAL and importlib.util.find_spec(root) is None:
                continue
            module = importlib.import_module(node.module)
            if not all(hasattr(module, alias.name) for alias in node.names):
                yield ast.unparse(node)


def test_figures_of_the_readme_are_those_of_the_performance_page() -> None:
    section = text("README.md").partition("## Three figures")[2].partition("\n## ")[0]
    named = re.findall(r"\*\*([\d.]+)\*\*", section)
    assert len(named) > 4
    measured = set(re.findall(r"(?<![\d.])\d+\.\d+", text("docs/performance.md")))
    assert [figure for figure in named if figure not in measured] == [], "copy them after `make figures`"


CODE_COLUMNS_MAX = 120  # fit beside the site's navigation (docs/stylesheets/holdfast.css)


def test_code_blocks_of_the_site_are_not_cut() -> None:
    on_site = [page for page in pages() if page.startswith("docs/") and page != "docs/cli.md"]
    assert len(on_site) > 30
    wide = [
        f"{page}: {len(line)} columns: {line}"
        for page in [*on_site, *GUIDES]
        for content in re.findall(r"^```\w*\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)
        for line in content.splitlines()
        if len(line) > CODE_COLUMNS_MAX
    ]
    assert not wide, "\n".join(wide)


GUIDES = (
    "docs/torchrun.md",
    *(f"docs/guides/{name}.md" for name in ("mpirun", "slurm", "moving")),
    *(f"docs/guides/{name}.md" for name in ("lightning", "transformers", "accelerate", "torchtitan")),
    "infra/kubernetes/README.md",
    "infra/skypilot/README.md",
)


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_ends_in_its_boundaries(page: str) -> None:
    headings = re.findall(r"^## (.*)$", text(page), re.MULTILINE)
    assert headings[-1] == "Boundaries"
    assert page.replace("infra/", "repository/infra/").removeprefix("docs/") in text("mkdocs.yml")


@pytest.mark.parametrize("folder", ["kubernetes", "skypilot", "slurm"])
def test_a_table_of_changes_names_fields_that_the_files_have(folder: str) -> None:
    section = text(f"infra/{folder}/README.md").partition("\n## What to change\n")[2].partition("\n## ")[0]
    fields = [
        name
        for row in re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
        for name in re.findall("`(.+?)`", row)
    ]
    launched = [name for name in files() if name.startswith(f"infra/{folder}/") and not name.endswith(".md")]
    assert len(fields) > 4
    assert [field for field in fields if not any(field in text(name) for name in launched)] == []


def test_the_readme_takes_ten_minutes() -> None:
    assert len(text("README.md").split()) <= 900


def test_the_path_of_a_reader_has_at_most_8000_words() -> None:
    roles = (
        f"docs/{name}.md"
        for name in ("tutorial", "architecture", "trainer", "stager", "flusher", "operations")
    )
    assert sum(len(text(page).split()) for page in ("README.md", *roles)) <= 8000
