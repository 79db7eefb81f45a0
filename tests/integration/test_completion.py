"""Real shells complete `holdfast` commands, by the script that it prints for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.job import HOLDFAST

# What bash does when Tab is pressed behind these words: the function that is registered, with bash's own variables.
BASH = """
eval "$(holdfast completion bash)"
words=("$@")
COMP_WORDS=("${words[@]}")
COMP_CWORD=$((${#words[@]} - 1))
registered=$(complete -p holdfast | sed -n 's/.*-F \\([^ ]*\\).*/\\1/p')
"$registered" holdfast "${words[-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = """
holdfast completion fish | source
complete --do-complete "$argv"
"""
ZSH = """
autoload -Uz compinit && compinit -u -D
eval "$(holdfast completion zsh)"
print -l ${_comps[holdfast]}
"""


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def run(shell: str, script: str, *words: str) -> list[str]:
    path = os.pathsep.join([str(Path(HOLDFAST).parent), os.environ["PATH"]])
    flag = ["--norc"] if shell == "bash" else ["--no-config"] if shell == "fish" else ["-f"]
    more = [shell, *words] if shell == "bash" else list(words)
    done = subprocess.run(
        [shell, *flag, "-c", script, *more],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split("\n")


@needs("bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["holdfast", "ver"], {"verify"}),
        (["holdfast", "ex"], {"export", "explain"}),
        (["holdfast", "flu"], {"flusher"}),
        (["holdfast", "cluster", ""], {"up", "status", "down"}),
        (["holdfast", "pull", "--"], {"--best", "--force", "--help", "--json", "--mode"}),
        (["holdfast", "export", "--to", ""], {"safetensors", "dcp", "torch"}),
        (["holdfast", "stager", "--on-divergence", "r"], {"refuse"}),
    ],
)
def test_bash_completes_holdfast(words: list[str], expected: set[str]) -> None:
    assert {word for word in run("bash", BASH, *words) if word} == expected


@needs("fish")
def test_fish_completes_holdfast() -> None:
    assert {line.partition("\t")[0] for line in run("fish", FISH, "holdfast ver") if line} == {"verify"}


@needs("zsh")
def test_zsh_completes_holdfast() -> None:
    assert run("zsh", ZSH)[0] == "_holdfast_completion"
