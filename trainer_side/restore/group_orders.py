"""Reorders the per-group lists of schedulers, if an optimizer's groups are in another order now.

groups of the checkpoint [a, b], of the script [b, a]:   base_lrs [0.1, 0.2] ─► [0.2, 0.1]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import StateError
from trainer_side.restore.mismatch import differ
from trainer_side.state.optimizer_places import reachable, value_at
from trainer_side.state.tree import containers

# Per-group lists of torch's and timm's schedulers.
_PER_GROUP = {
    *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs"),
    *("base_momentums", "max_momentums", "base_values"),
}
_ADVICE = "give the optimizer its groups in the order in which they were saved; nothing was loaded"


class GroupOrder(NamedTuple):
    """The order of an optimizer's groups in the script, compared with the checkpoint."""

    path: str  # of its dictionary in the state
    groups: Sequence[int]  # for each group of the script, the number of its counterpart in the checkpoint

    @property
    def is_same(self) -> bool:
        return list(self.groups) == sorted(self.groups)

    def of(self, values: Sequence[Any]) -> list[Any]:
        return [values[number] for number in self.groups]


def reorder_schedulers(
    state: Mapping[str, Any],
    live: Mapping[str, Any],
    tree: Mapping[str, Any],
    orders: Mapping[int, GroupOrder],
) -> None:
    """Reorder the lists of all schedulers in the tree whose optimizer has its groups in another order.

    `live`: Result of `live_trees`. `tree`: The saved tree; modified. `orders`: By `id()` of the optimizer.
    StateError: it is unknown whether a list follows the groups, or which optimizer it belongs to; names it.
    """
    moved = {key: order for key, order in orders.items() if not order.is_same}
    if not moved:
        return
    places = {id(value): path for path, _, value in _lists(live)}
    done: set[str] = set()
    for scheduler in reachable(state):
        order = moved.get(id(getattr(scheduler, "optimizer", None)))
        if order is None or not hasattr(scheduler, "__dict__"):
            continue
        known = [places[id(one)] for one in vars(scheduler).values() if id(one) in places]
        for path in dict.fromkeys(known):
            if path not in done:
                done.add(path)
                _reorder(path, value_at(tree, path) if path else tree, order, scheduler)
    for path, key, value in list(_lists(tree)):
        for order in moved.values():
            if path not in done and key in _PER_GROUP and _would_change(value, order):
                raise StateError(
                    f"{path}/{key}: the groups of {order.path} are in another order than in the checkpoint, and it "
                    f"cannot be told whether this list is of that optimizer; {_ADVICE}"
                )


def check_kinds(live: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """Refuse a list of dictionaries of several kinds in another order, such as the schedulers of a SequentialLR.

    StateError: the same kinds, by their keys, were saved in another order; names the first.
    """
    for path, key, values in _lists(live):
        if key == "param_groups" or len(values) < 2 or not all(isinstance(one, dict) for one in values):
            continue
        place = f"{path}/{key}" if path else str(key)
        saved = value_at(tree, place)
        if not isinstance(saved, list | tuple) or not all(isinstance(one, dict) for one in saved):
            continue
        own, there = [*map(_kind, values)], [*map(_kind, saved)]
        if (number := first_moved(own, there)) is not None:
            expected = _format_keys(there[number] - own[number])
            got = _format_keys(own[number] - there[number])
            raise StateError(
                f"{place}/{number}: expected what the checkpoint has there ({expected}), got another kind ({got}): all "
                "kinds were saved, in another order; make the list in the order in which it was saved; nothing was "
                "loaded"
            )


def first_moved(own: Sequence[Hashable], there: Sequence[Hashable]) -> int | None:
    """Return the first place with another item if both have the same items in different orders; else None."""
    if Counter(own) != Counter(there):
        return None
    return next((number for number, one in enumerate(own) if one != there[number]), None)


def _kind(value: Mapping[Any, Any]) -> frozenset[str]:
    return frozenset(str(key) for key in value if not str(key).startswith("_"))


def _format_keys(keys: frozenset[str]) -> str:
    return ", ".join(sorted(keys)[:3]) or "less"


def _reorder(path: str, saved: Any, order: GroupOrder, scheduler: Any) -> None:
    if not isinstance(saved, dict):
        return
    for key, value in saved.items():
        if not _would_change(value, order):
            continue
        if key in _PER_GROUP:
            saved[key] = type(value)(order.of(value))
        elif not type(scheduler).__module__.startswith("torch."):
            raise StateError(
                f"{path}/{key}: the groups of {order.path} are in another order than in the checkpoint, and it is not "
                f"known whether this list of {type(scheduler).__name__} follows them; {_ADVICE}"
            )


def _would_change(value: Any, order: GroupOrder) -> bool:
    """Whether the value may be a per-group list, and reordering would change it."""
    if not isinstance(value, list | tuple) or len(value) != len(order.groups):
        return False
    return any(differ(one, other) for one, other in zip(value, order.of(value), strict=True))


def _lists(tree: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield all lists in dictionaries: path of the dictionary, key, list."""
    for prefix, node in containers(tree):
        if isinstance(node, dict):
            for key, value in node.items():
                if isinstance(value, list | tuple):
                    yield prefix.removesuffix("/"), key, value
