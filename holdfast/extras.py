"""The packages of holdfast's extras, for messages that say what to install.

The messages do not name holdfast itself: it is not on the package index, so installing that name could install a
stranger's package.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires


def install_line(*extras: str) -> str:
    """Return the pip command for the requirements of these extras, as this installation states them."""
    try:
        stated = requires("holdfast") or []
    except PackageNotFoundError:  # run from a checkout that is not installed
        return f"in its checkout: pip install '.[{','.join(extras)}]'"
    found = [
        one.partition(";")[0].strip()
        for extra in extras
        for one in stated
        if one.endswith((f"extra == '{extra}'", f'extra == "{extra}"'))
    ]
    return " ".join(["pip install", *(f"'{one}'" for one in dict.fromkeys(found))])
