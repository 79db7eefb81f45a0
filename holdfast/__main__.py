"""`python -m holdfast`: the `holdfast` command, for use when that script is not on PATH."""

from holdfast.command.cli import main

main()
