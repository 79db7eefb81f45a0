"""A copy of a tree's containers, for a pickle that is made later and must say what is in the tree now.

    {"model": OrderedDict(w=t0), "done": [1, 2]}  ─►  OrderedDict(w=«t0») as it was kept · another dict, another list

Tensors are replaced by what stands for them in the pickle (pickling.StandIn): a copy keeps none alive. Containers that
hold nothing else, all the way down, are the same at every save: they are copied once, and kept. Of values whose class
is not known nobody can say what it takes to keep them as they are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer_side.state.arriving import Arriving

_KEPT = frozenset(
    {bool, int, float, type(None), Arriving}
)  # and str: all that is pickled without naming a class


class Snapshot(NamedTuple):
    """A tree as it was.

    Attributes:
        tree: The copy. What was one container in it is one here.
        text_length: Of all its strings together; keys do not count.
    """

    tree: Any
    text_length: int


class _UnknownError(ValueError):
    """A value of another class."""


def snapshot(tree: Any, known: Mapping[int, Any]) -> Snapshot | None:
    """Copy the containers of `tree`; None if it holds anything of a class that is not known, or itself.

    Args:
        tree: A dict, OrderedDict, Counter, list or tuple.
        known: By id(): what takes the place of a tensor, or of a container.
    """
    copying = _Copying(known)
    try:
        return Snapshot(copying.of(tree), copying.text_length)
    except (_UnknownError, RecursionError):
        return None


class _Copying:
    def __init__(self, known: Mapping[int, Any]) -> None:
        self.text_length = 0
        self._copies = {**known}  # by id(): all of it lives in the tree meanwhile

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _KEPT:
            return value
        if kind is str:
            self.text_length += len(value)
            return value
        if (copied := self._copies.get(id(value))) is not None:
            return copied
        # A comprehension asks for itself what most values are: a call for each would take several times as long.
        if kind is dict:
            copied = {key: one if type(one) in _KEPT else self.of(one) for key, one in value.items()}
        elif kind is OrderedDict:
            copied = OrderedDict((key, self.of(one)) for key, one in value.items())
            if attributes := vars(value):  # the versions of modules, in the state of one; pickled with it
                vars(copied).update(self.of(attributes))
        elif kind is Counter:  # of a scheduler's milestones; attributes are not pickled with it
            copied = Counter({key: self.of(one) for key, one in value.items()})
        elif kind is list or kind is tuple:
            copied = kind([one if type(one) in _KEPT else self.of(one) for one in value])
        else:
            raise _UnknownError
        self._copies[id(value)] = copied
        return copied


class _Constant(NamedTuple):
    """A container with tensors alone.

    Attributes:
        place: Among the containers of a tree.
        copied: What is in its place in every snapshot.
        attributes: Those that it must have for that; None: it is of a class that has none.
    """

    place: int
    copied: Any
    attributes: dict[str, Any] | None


class Constants:
    """The containers with tensors alone in trees of one outline, and their copies. Keeps nothing of a tree but keys.

    Args:
        containers: Of one such tree, those above before those below, without any that holds itself.
        known: By id(): what takes the place of each of its tensors.

    Raises:
        ValueError: One of them has attributes of a class that is not known.
    """

    def __init__(self, containers: Sequence[Any], known: Mapping[int, Any]) -> None:
        constant: set[int] = set()
        # Those without attributes, in one place only: to know the one above is to know it. Of one that is in several
        # places, it is another tree's business which ones these are.
        inner: set[int] = set()
        times = Counter(id(value) for node in containers for value in _values(node) or ())
        for node in reversed(containers):
            values = _values(node)
            if values is not None and all(id(value) in known or id(value) in inner for value in values):
                constant.add(id(node))
                if times[id(node)] == 1 and not _attributes(node):
                    inner.add(id(node))
        below = {
            id(value) for node in containers if id(node) in constant for value in _values(node) or ()
        } & inner
        self._constants = [
            _Constant(place, _Copying(known).of(node), _Copying(known).of(_attributes(node)))
            for place, node in enumerate(containers)
            if id(node) in constant and id(node) not in below
        ]

    def known(self, containers: Sequence[Any]) -> dict[int, Any]:
        """For `snapshot`: what takes the place of some of these containers.

        Args:
            containers: Of another tree of the outline, in the same order.
        """
        return {
            id(containers[place]): copied
            for place, copied, attributes in self._constants
            if _attributes(containers[place]) == attributes
        }


def _values(node: Any) -> Sequence[Any] | None:
    if type(node) is dict or type(node) is OrderedDict or type(node) is Counter:
        return [*node.values()]
    return node if type(node) is list or type(node) is tuple else None


def _attributes(node: Any) -> dict[str, Any] | None:
    return vars(node) if type(node) is OrderedDict else None
