"""`holdfast completion bash|zsh|fish`: the script with which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from holdfast.command.examples import examples

_VARIABLE = "_HOLDFAST_COMPLETE"  # the variable that click reads when `holdfast` starts


@click.command(
    short_help="Print the completion script for a shell.",
    epilog=examples(
        'eval "$(holdfast completion bash)"                                      # in ~/.bashrc',
        'eval "$(holdfast completion zsh)"                                       # in ~/.zshrc',
        "holdfast completion fish > ~/.config/fish/completions/holdfast.fish",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script with which SHELL completes commands, options and their values. Bash must be 4.4 or newer."""
    root = click.get_current_context().find_root().command
    found = get_completion_class(shell)
    assert found is not None, shell
    click.echo(found(root, {}, "holdfast", _VARIABLE).source())
