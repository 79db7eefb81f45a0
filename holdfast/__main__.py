"""`python -m holdfast`: the command, where the script of that name is not on PATH."""

from holdfast.command.cli import main

main()
