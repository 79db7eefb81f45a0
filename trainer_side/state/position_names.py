"""Names for what a file only numbers: the paths in the state of each parameter in an optimizer, or tensor in a list.

    param_groups   [{"lr": …, "params": [0, 1]}, {"lr": …, "params": [2]}]
    names          [["model/a.weight", ["model/head.weight", "model/embed.weight"]], [{"shape": [3, 4]}]]
                                        two paths: tied                               in no part of the state
    {"shadow": [t0, t1]} of an object with a list of parameters [a.weight, b.weight]: the names of these

The JSON also lists the optimizer tensors that lay in host memory while their parameter did not, because all tensors are
saved as on the CPU. It lies behind the pickle, at the end of the room that `data.pkl` has for growing. Every reader of
pickles stops at the pickle's own end, so the names do not change the tree of the file:

    data.pkl       pickle │ zeros │ JSON │ its bytes, as u32 │ "HFNAMES1"
"""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple

import torch

from holdfast.errors import DamageError, StateError
from trainer_side.state.optimizer_places import (
    host_tensor_paths,
    is_optimizer_dict,
    locate_optimizers,
    module_parameters,
    optimizers_of,
    reachable,
    reachable_with_paths,
)
from trainer_side.state.per_rank import PerRank
from trainer_side.state.split_tensor import local_of
from trainer_side.state.tree import (
    ReturnedGroups,
    children,
    record_param_groups,
    tensor_paths,
    unwrap_per_rank,
    view_key,
)

_MAGIC = b"HFNAMES1"
_END = struct.Struct(f"<I{len(_MAGIC)}s")


class Position(NamedTuple):
    """One parameter of an optimizer."""

    # Its paths in the state: several if it is tied, none if no part of the state holds it.
    names: tuple[str, ...]
    shape: tuple[int, ...] | None = None  # None: that of the tensor at its paths


Positions = Mapping[str, Sequence[Sequence[Position]]]
"""Path of an optimizer's dictionary in the tree to its groups, and their parameters in order; a list is one group."""


def positions(
    state: Mapping[str, Any], tree: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, list[list[Position]]]:
    """Return the names of these optimizers' parameters, and of lists that follow parameters. Training thread.

    `tree`: Has live tensors. `optimizers`: By the path of their dictionaries in the tree.
    """
    names = _by_id(module_parameters(unwrap_per_rank(state)))
    places: dict[Any, list[str]] | None = None
    inner: dict[int, list[str]] | None = None
    found: dict[str, list[list[Position]]] = {}
    for at, optimizer in optimizers.items():
        found[at] = []
        for group in optimizer.param_groups:
            found[at].append([])
            for number, parameter in enumerate(group["params"]):
                own = names.get(id(parameter))
                if own is None:
                    if places is None:
                        places = _paths_by_memory(tree, optimizers)
                    own = places.get(view_key(local_of(parameter))) or _own_name(group, number)
                if not own:
                    inner = _inner_names(state) if inner is None else inner
                    own = inner.get(id(parameter), [])
                shape = None if own else tuple(parameter.shape)
                found[at][-1].append(Position(tuple(own), shape))
    found.update(_list_positions(state, tree, names))
    return found


def _inner_names(state: Mapping[str, Any]) -> dict[int, list[str]]:
    """Name the parameters of modules inside the script's objects, which may save copies or nothing, by the attributes
    that lead there.
    """
    inner = ({path: value} for path, value in reachable_with_paths(unwrap_per_rank(state)) if "/" in path)
    return _by_id(chain.from_iterable(map(module_parameters, inner)))


def _by_id(named: Iterable[tuple[str, torch.Tensor]]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), []).append(name)
    return names


def _list_positions(
    state: Mapping[str, Any], tree: Mapping[str, Any], names: Mapping[int, Sequence[str]]
) -> Iterator[tuple[str, list[list[Position]]]]:
    """Yield the lists of tensors that follow parameters of the same object, as moving averages do."""
    for at, value in state.items():
        found = [*tensor_lists(at, value, tree.get(at))]
        if not found:
            continue
        known = [known for one in reachable({at: value}) if (known := _parameters_of(one, names)) is not None]
        for path, tensors in found:
            shapes = [tensor.shape for tensor in tensors]
            candidates = {
                tuple(tuple(names[id(one)]) for one in parameters)
                for parameters in known
                if [one.shape for one in parameters] == shapes
            }
            if len(candidates) == 1:
                yield path, [[Position(own) for own in candidates.pop()]]


def tensor_lists(at: str, value: Any, tree: Any) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
    """Yield the lists of several tensors in the tree of a script's object `value`, named `at`, with their paths."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.Tensor):
        return  # they have names, or numbers, of their own
    seen: set[int] = set()
    pending = [(at, tree)]
    while pending:
        path, node = pending.pop()
        if id(node) in seen or not isinstance(node, dict | list | tuple) or is_optimizer_dict(node):
            continue
        seen.add(id(node))
        if isinstance(node, list) and len(node) > 1 and all(isinstance(one, torch.Tensor) for one in node):
            yield path, node
        else:
            pending += [(f"{path}/{key}", one) for key, one in children(node)]


def _parameters_of(value: Any, names: Mapping[int, Sequence[str]]) -> list[torch.Tensor] | None:
    """Return the parameters in a list of parameters, or of weak references to them; None for any other list."""
    if not isinstance(value, list | tuple) or len(value) < 2:
        return None
    found = [one() if isinstance(one, weakref.ref) else one for one in value]
    known = [one for one in found if isinstance(one, torch.Tensor) and id(one) in names]
    return known if len(known) == len(found) else None


def _paths_by_memory(tree: Mapping[str, Any], optimizers: Mapping[str, Any]) -> dict[Any, list[str]]:
    """Return the paths of the tensors outside of optimizers, by `view_key` their memory."""
    places: dict[Any, list[str]] = {}
    for path, tensor in tensor_paths(tree):
        view = view_key(local_of(tensor))
        if view is not None and tensor.numel() and not any(path.startswith(f"{at}/") for at in optimizers):
            places.setdefault(view, []).append(path)
    return places


def _own_name(group: Mapping[str, Any], number: int) -> list[str]:
    """Return the name that the script gave to torch, as in `AdamW(model.named_parameters())`; empty without one."""
    own = group.get("param_names")
    return [str(own[number])] if isinstance(own, list) and number < len(own) else []


class SavedNames:
    """The names in one rank's files, rebuilt when its optimizers get other parameters. Training thread. Only a rank
    that `is_writer` of data.pkl needs names.
    """

    def __init__(self, state: Mapping[str, Any], *, is_writer: bool) -> None:
        self._state, self._is_writer = state, is_writer
        self._optimizers: list[torch.optim.Optimizer] = []
        self._parameters: ParameterOrder | None = None
        self.trailer = b""  # the end of data.pkl; empty where the state has no optimizer

    def record_param_groups(self) -> AbstractContextManager[ReturnedGroups]:
        """Return the context of `tree.record_param_groups` in which the caller collects the state."""
        if self._is_writer and not self._optimizers:
            self._optimizers = optimizers_of(self._state)
        return record_param_groups(self._optimizers)

    def refresh(self, tree: Mapping[str, Any], given: ReturnedGroups) -> None:
        """Rebuild the names if an optimizer has other parameters, or another order of them."""
        if self._is_writer and (self._parameters is None or self._parameters.have_changed()):
            self._build(tree, given)

    def rebuild(self, tree: Mapping[str, Any], given: ReturnedGroups) -> None:
        """Rebuild the names because the state has other tensors. The next save names new optimizers."""
        if not self._is_writer:
            return
        self._build(tree, given)
        found = optimizers_of(self._state)
        if list(map(id, found)) != list(map(id, self._optimizers)):
            self._optimizers, self._parameters = found, None

    def _build(self, tree: Mapping[str, Any], given: ReturnedGroups) -> None:
        self._parameters = ParameterOrder(self._optimizers)
        try:
            found = locate_optimizers(tree, self._state, given)
            self.trailer = to_trailer(positions(self._state, tree, found), host_tensor_paths(tree, found))
        except StateError:
            self.trailer = b""  # the state cannot be saved; the agreement of the ranks reports it


class ParameterOrder:
    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._sizes, parameters = self._current()
        self._known = [*map(weakref.ref, parameters)]

    def have_changed(self) -> bool:
        """Whether an optimizer now has other parameters, or another order of them."""
        sizes, now = self._current()
        if sizes != self._sizes:
            return True
        return not all(ref() is parameter for ref, parameter in zip(self._known, now, strict=True))

    def _current(self) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Return the sizes of the groups of each optimizer, and all parameters in order."""
        groups = [[group["params"] for group in one.param_groups] for one in self._optimizers]
        parameters = [parameter for one in groups for group in one for parameter in group]
        return [[*map(len, one)] for one in groups], parameters


def to_trailer(found: Positions, of_host: Sequence[str] = ()) -> bytes:
    """Encode the names as the end of data.pkl; empty if there are none."""
    if not any(group for groups in found.values() for group in groups):
        return b""
    said = {"names": to_rows(found), **({"on_host": list(of_host)} if of_host else {})}
    rows = json.dumps(said, separators=(",", ":"), ensure_ascii=False)
    text = rows.encode(errors="surrogatepass")
    return text + _END.pack(len(text), _MAGIC)


def pad_pickle(pickled: bytes, trailer: bytes, room_bytes: int) -> bytes:
    """Return the content of data.pkl. The caller makes sure that the room holds both parts."""
    return pickled.ljust(room_bytes - len(trailer), b"\0") + trailer


def from_record(record: bytes, *, source: str) -> dict[str, list[list[Position]]]:
    """Read the names behind the pickle of data.pkl; none in files of other tools. DamageError: they cannot be read."""
    try:
        return from_rows(_read_trailer(record).get("names", {}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"{source}: the names behind the pickle cannot be read: {error!r:.200}") from error


def read_on_host(record: bytes) -> frozenset[str]:
    """Return the result of `host_tensor_paths` at the time of the save, from a data.pkl that `from_record` has read."""
    return frozenset(map(str, _read_trailer(record).get("on_host", ())))


def _read_trailer(record: bytes) -> dict[str, Any]:
    if len(record) < _END.size:
        return {}
    nbytes, magic = _END.unpack(record[-_END.size :])
    if magic != _MAGIC:
        return {}
    begin = len(record) - _END.size - nbytes
    if begin < 0:
        raise ValueError(f"{nbytes} bytes of {len(record)}")
    said = json.loads(record[begin : len(record) - _END.size].decode(errors="surrogatepass"))
    return {"names": said["names"], "on_host": [str(one) for one in said.get("on_host", ())]}


def to_rows(found: Positions) -> dict[str, Any]:
    return {at: [[_row(position) for position in group] for group in groups] for at, groups in found.items()}


def from_rows(rows: Any) -> dict[str, list[list[Position]]]:
    """The inverse of `to_rows`. Raises AttributeError, KeyError, TypeError or ValueError for other rows."""
    return {str(at): [[_position(row) for row in group] for group in groups] for at, groups in rows.items()}


def _row(position: Position) -> Any:
    if not position.names:
        return {"shape": list(position.shape or ())}
    return position.names[0] if len(position.names) == 1 else list(position.names)


def _position(row: Any) -> Position:
    if isinstance(row, dict):
        return Position((), tuple(map(int, row["shape"])))
    if isinstance(row, str):
        return Position((row,))
    if not isinstance(row, list) or not row or not all(isinstance(name, str) for name in row):
        raise ValueError(f"{row!r:.80} is no name")
    return Position(tuple(row))


class PerRankNames:
    """Keeps `PerRank.names` up to date for all values of this rank's state. Training thread."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._known: dict[str, tuple[ParameterOrder, bytes]] = {}

    def refresh(self, tree: Mapping[str, Any], *, is_new: bool = False) -> None:
        """Rebuild the names of values whose optimizers have other parameters or another order; of all if `is_new`."""
        for name, value in self._state.items():
            if not isinstance(value, PerRank):
                continue
            known = self._known.get(name)
            if is_new or known is None or known[0].have_changed():
                known = self._known[name] = self._build(name, value, tree)
            value.names = known[1]

    def _build(self, name: str, value: PerRank, tree: Mapping[str, Any]) -> tuple[ParameterOrder, bytes]:
        optimizers = optimizers_of({name: value.value})
        try:
            with record_param_groups(optimizers) as given:
                whole = {**tree, name: value.snapshot()}
            here = unwrap_per_rank(self._state)
            every = positions(here, whole, locate_optimizers({name: whole[name]}, {name: here[name]}, given))
        except Exception:  # noqa: BLE001 - the script's own code; the save that follows reports its error
            every = {}
        own = {path: groups for path, groups in every.items() if path.partition("/")[0] == name}
        return ParameterOrder(optimizers), to_trailer(own)
