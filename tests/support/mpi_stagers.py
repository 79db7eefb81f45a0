"""Rewrites the mpirun line of a job with one stager for several stagers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

__all__ = ["with_stagers"]


def with_stagers(
    count: int, *, first: bool = False, before: Mapping[int, Sequence[str]] | None = None
) -> Callable[[list[str]], list[str]]:
    """A `rewrite` for `Cluster.start`. `first`: the stagers have the lowest world ranks. `before`: prefix of a stager's
    command, such as `env NAME=value`, by the index of its share.
    """

    def rewrite(line: list[str]) -> list[str]:
        begin, colon = line.index("-n"), len(line) - 1 - line[::-1].index(":")
        options, trainers, stager = line[:begin], line[begin:colon], line[colon + 3 :]
        if "--oversubscribe" not in options:
            options.append("--oversubscribe")
        # One entry each, since they may differ: mpirun numbers processes in the order of the line.
        stagers = [["-n", "1", *(before or {}).get(index, ()), *stager] for index in range(count)]
        parts = [["-n", str(count), *stager]] if before is None else stagers
        parts = [*parts, trainers] if first else [trainers, *parts]
        return options + [word for part in parts for word in (":", *part)][1:]

    return rewrite
