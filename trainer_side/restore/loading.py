"""Loads a restored tree into the live objects of the state.

    check_state_fits   names and shapes, before the first byte is read    live_trees   tensors that may be read over
    open_per_rank      this rank's PerRank values: opened, matched by name and checked, after all bytes are read
    load               objects ─► tensors ─► PerRank values ─► RNG states

The content of a `PerRank` blob is unknown before it is read. If one may be refused, nothing is read in place.
Random states come last, because another object's `load_state_dict` may draw random numbers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from holdfast.errors import StateError
from trainer_side.restore.joining_by_name import join_by_name
from trainer_side.restore.mismatch import describe_mismatch, differ, find_read_only
from trainer_side.restore.split_parts import SplitPart
from trainer_side.restore.structure import unique_paths
from trainer_side.restore.torch_loading import in_place_tensors, is_loaded_by_torch, rewrap
from trainer_side.restore.uncast import uncast, uncasting
from trainer_side.state.optimizer_places import locate_optimizers, optimizers_of
from trainer_side.state.per_rank import PerRank
from trainer_side.state.per_rank_blob import decode, read_trailer
from trainer_side.state.position_names import Positions, from_record, tensor_lists
from trainer_side.state.rng import RngState
from trainer_side.state.split_tensor import local_of, writable
from trainer_side.state.tree import (
    record_param_groups,
    tensor_paths,
    tensor_refusal,
    unwrap_per_rank,
    with_inner_optimizers,
)


@contextmanager
def same_group_lists(optimizer: Optimizer) -> Iterator[None]:
    """Keep all `param_groups` objects while state is loaded into `optimizer` and those it wraps. Training thread.

    Optimizers that override `load_state_dict` are left alone: only they know who refers to their groups.
    """
    together = with_inner_optimizers([optimizer])
    if any(type(one).load_state_dict is not Optimizer.load_state_dict for one in together):
        yield
        return
    before = [(one, one.param_groups, [*one.param_groups]) for one in together]
    yield
    kept = {}
    for one, groups, members in before:
        loaded = one.param_groups
        if loaded is groups:
            continue
        if id(loaded) not in kept:
            if len(loaded) != len(members):
                continue
            _keep_tensors(members, loaded)
            for member, group in zip(members, loaded, strict=True):
                if member is not group:
                    fresh = dict(group)
                    member.clear()
                    member.update(fresh)
            groups[:] = members
            kept[id(loaded)] = groups
        one.param_groups = kept[id(loaded)]


def _keep_tensors(groups: Sequence[dict[str, Any]], loaded: Sequence[dict[str, Any]]) -> None:
    """Copy tensors among the loaded settings, such as a learning rate, into those of `groups`, and put these in place.

    The script, or code that it has compiled, may hold the tensor. One that several groups share here, but not in the
    checkpoint, stays as it is.
    """
    pairs: dict[int, list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
    for group, fresh in zip(groups, loaded, strict=True):
        for key, own in group.items():
            value = fresh.get(key)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own is not value:
                pairs.setdefault(id(own), []).append((fresh, key, own))
    for found in pairs.values():
        fresh, key, own = found[0]
        value = fresh[key]
        is_one = all(other[name] is value for other, name, _ in found)
        if is_one and (own.shape, own.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                own.copy_(value)
            for other, name, _ in found:
                other[name] = own


def refill(live: Any, saved: Any) -> bool:
    """Replace the content of the container `live` by that of `saved`, recursively. Training thread.

    Tensors of equal shape and dtype are copied into those of `live`, to which the script may have other references. A
    split tensor in `saved` is the live one itself, already filled. False: `live` is of another kind, and unchanged.
    """
    if live is saved:
        return True
    if isinstance(live, dict) and isinstance(saved, Mapping):
        content = {key: _merge(live.get(key), value) for key, value in saved.items()}
        live.clear()
        live.update(content)
    elif isinstance(live, list) and isinstance(saved, list):
        old = [*live, *[None] * (len(saved) - len(live))]
        live[:] = [_merge(before, value) for before, value in zip(old, saved, strict=False)]
    elif isinstance(live, set) and isinstance(saved, set):
        live.clear()
        live.update(saved)
    elif isinstance(live, deque) and isinstance(saved, deque):
        live.clear()
        live.extend(saved)
    else:
        return False
    return True


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements are one in memory, so that torch copies nothing into it."""
    return any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _merge(live: Any, saved: Any) -> Any:
    if live is saved:
        return live
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if live.shape == saved.shape and live.dtype == saved.dtype and not _is_expanded(live):
            with torch.no_grad():
                return live.copy_(saved)
        return saved
    return live if refill(live, saved) else saved


@contextmanager
def rolled_back_on_error(value: Any, live: Any) -> Iterator[None]:
    """Restore the tensors of `value` if the block raises. Training thread.

    `live`: Its `state_dict()`, whose tensors are restored if `value` is neither a module nor an optimizer.
    """
    held = [local_of(tensor).detach() for tensor in _tensors(value, live)]
    kept = [(tensor, tensor.to("cpu", copy=True)) for tensor in held if not tensor.is_meta]
    members = [(holder, dict(holder)) for holder in _tensor_dicts(value)]
    of_optimizer = ("state", "param_groups") if isinstance(value, Optimizer) else ()
    optimizer = {name: vars(value)[name] for name in of_optimizer}
    try:
        yield
    except BaseException:
        if optimizer:
            vars(value).update(optimizer)
        for holder, before in members:
            holder.clear()
            holder.update(before)
        with torch.no_grad():
            for tensor, copied in kept:
                tensor.copy_(copied)
        raise


def _tensors(value: Any, live: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        own = [*value.parameters(), *value.buffers()]
        return [tensor for tensor in own if not is_lazy(tensor)]
    if isinstance(value, Optimizer):
        live = [*value.state.values()]
    return [tensor for _, tensor in tensor_paths(live)]


def _tensor_dicts(value: Any) -> list[dict[Any, Any]]:
    """The dictionaries in which the object keeps tensors, which loading may replace."""
    if isinstance(value, torch.nn.Module):
        return [holder for module in value.modules() for holder in (module._parameters, module._buffers)]
    if isinstance(value, Optimizer):
        holders = (value.state, *value.state.values(), *value.param_groups)
        return [holder for holder in holders if isinstance(holder, dict)]
    return []


_log = logging.getLogger("holdfast.restore")
_NAMES_SHOWN = 5  # at most this many problems of one kind are named


def live_trees(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of all objects and tensors, by name. Its tensors may be read over. StateError: one failed."""
    trees: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, PerRank):
            continue
        if isinstance(value, torch.Tensor):
            trees[name] = value
        elif _loadable(value):
            try:
                trees[name] = value.state_dict()
            except Exception as error:  # the user's code may raise anything
                raise StateError(
                    f"{name}: state_dict() of {type(value).__name__} failed: {error!r}"
                ) from error
    return trees


def check_state_fits(
    state: Mapping[str, Any],
    live: Mapping[str, Any],
    parts: Mapping[str, SplitPart],
    tree: Any,
    step: int,
    *,
    ranks: int,
    may_lack: Collection[str] = (),
) -> None:
    """Check that the checkpoint fits the state, before anything is changed.

    `live`: Result of `live_trees`. `parts`: Its split tensors, compared by their whole shapes. `ranks`: Of this job.
    `may_lack`: Names that the checkpoint need not have. StateError: a name is missing; names, groups or shapes of an
    object differ; or an object cannot be loaded.
    """
    if not isinstance(tree, dict):
        raise StateError(
            f"step {step}: expected a dict, which the state of a Checkpointer is, the file holds a "
            f"{type(tree).__name__}; look at it with `holdfast inspect`"
        )
    lacking = sorted(set(state) - set(tree))
    missing = [name for name in lacking if name not in may_lack]
    if missing:
        raise StateError(
            f"step {step}: the checkpoint has no {', '.join(map(repr, missing))}; it has {', '.join(map(repr, tree))}; "
            "give the Checkpointer the names with which it was saved, or let what is new stay as it is with "
            f"restore(may_lack={missing!r})"
        )
    if lacking:
        _log.warning(
            "step %d: the checkpoint does not have these names, so they keep the script's values: %s",
            step,
            ", ".join(map(repr, lacking)),
        )
    without_load = [name for name, value in state.items() if _savable(value) and not _loadable(value)]
    if without_load:
        raise StateError(
            f"{', '.join(map(repr, without_load))}: state_dict() is there, but load_state_dict() is missing; add it, "
            "so that the object can be restored"
        )
    mismatches = [
        text
        for name, value in state.items()
        if name in tree and (text := describe_mismatch(name, value, tree[name], ranks=ranks))
    ]
    if mismatches:
        raise StateError(
            f"step {step}: {_few(mismatches)}; pass the objects that were saved, or "
            "give new ones another name and restore with may_lack; nothing was loaded"
        )
    if read_only := find_read_only(in_place_tensors(state, live, tree)):
        raise StateError(
            f"step {step}: no value can be written into the memory of {_few(read_only)}: it is a file that is mapped "
            "for reading; give the state a clone() of the tensor; nothing was loaded"
        )
    extra = [name for name in tree if name not in state]
    if extra:
        _log.warning(
            "step %d: the state does not have these names of the checkpoint, so they are not restored: %s",
            step,
            ", ".join(map(repr, extra)),
        )
    wrong, converted = _differences(state, live, parts, tree)
    if wrong:
        raise StateError(
            f"step {step}: the checkpoint has other shapes than this state: {_few(wrong)}; nothing was loaded"
        )
    if converted:
        _log.warning("step %d: values are converted to the dtypes of the state: %s", step, _few(converted))


def _differences(
    state: Mapping[str, Any], live: Mapping[str, Any], parts: Mapping[str, SplitPart], tree: Any
) -> tuple[list[str], list[str]]:
    """Return the tensors that have other shapes, and those that have other dtypes.

    Compared are tensors that torch loads without custom code (other objects may accept another shape), and split
    tensors in plain values and `Split`s, which are filled in place.
    """
    fixed = in_place_tensors(state, live, tree)
    own = {path for path, _ in tensor_paths({name: live[name] for name in live if name not in fixed})}
    here, there = tensor_paths(fixed), tensor_paths(tree)
    unambiguous_there = unique_paths(path for path, _ in there)
    unambiguous = unique_paths(path for path, _ in here) & unambiguous_there
    saved = dict(there)
    whole = [
        (path, tensor.shape, tensor.dtype)
        for path, tensor in here
        if path in unambiguous and path not in parts and tensor_refusal(tensor) is None
    ]
    for path, part in parts.items():
        if path in unambiguous_there and path not in own:
            whole.append((path, torch.Size(part.held.shape), part.held.local.dtype))
    wrong, converted = [], []
    for path, shape, dtype in whole:
        if saved[path].shape != shape:
            wrong.append(f"{path}: expected {list(shape)}, the checkpoint has {list(saved[path].shape)}")
        elif saved[path].dtype != dtype:
            converted.append(f"{path}: {saved[path].dtype} to {dtype}")
    return wrong, converted


def may_refuse(state: Mapping[str, Any]) -> bool:
    """Whether a `PerRank` value may turn out not to fit the saved one."""
    own = [value.value for value in state.values() if isinstance(value, PerRank)]
    return any(isinstance(one, torch.nn.Module) or optimizers_of({"": one}) for one in own)


def open_per_rank(
    state: Mapping[str, Any], live: Mapping[str, Any], tree: dict[str, Any], names: Positions, *, rank: int
) -> None:
    """Replace the blobs of all ranks in the tree by this rank's values. Training thread, before `load`.

    A value that the checkpoint lacks for this rank is removed from the tree, and logged. `live`: Result of
    `live_trees`. `tree`: The saved tree with this rank's bytes; modified. `names`: Parameter names in the file.
    DamageError: a value in the file is not a blob. StateError: a value, or a parameter in it, does not fit.
    """
    inner = unwrap_per_rank(state)
    for name, value in state.items():
        if not isinstance(value, PerRank) or name not in tree:
            continue
        blobs = tree[name]
        if rank >= len(blobs):
            _log.warning(
                "%s: the checkpoint has values of %d ranks and none for rank %d, so that rank keeps the script's value",
                name,
                len(blobs),
                rank,
            )
            del tree[name]
            continue
        what = f"{name} of rank {rank}"
        tree[name] = decode(blobs[rank], name=what)
        own = {**names, **from_record(read_trailer(blobs[rank]), source=what)}
        held = inner[name]
        if isinstance(held, torch.nn.Module):
            rewrap({name: held}, {name: held.state_dict()}, tree)
        if isinstance(held, torch.nn.Module | torch.optim.Optimizer):
            wrong = describe_mismatch(name, held, tree[name], ranks=len(blobs))
            if wrong:
                raise StateError(f"{wrong}; nothing was loaded")
        with record_param_groups(optimizers_of({name: held})) as given:
            here = value.snapshot()
        optimizers = locate_optimizers({name: here}, {name: held}, given)
        if optimizers or any(tensor_lists(name, held, here)):
            join_by_name(inner, {**live, name: here}, tree, own, optimizers)


def load(
    state: Mapping[str, Any],
    live: Mapping[str, Any],
    tree: dict[str, Any],
    *,
    in_place: Collection[str] = (),
    on_host: Collection[int] = (),
) -> dict[str, Any]:
    """Load every name of `state` that the tree has, and remove it from the tree. Training thread.

    The removal frees the memory of each object's part once the object is loaded. `live`: Result of `live_trees`.
    `tree`: The saved tree, after `open_per_rank`. `in_place`: Names whose live tensors were read into. `on_host`:
    Tensors of the tree that optimizers keep in host memory (`uncast.offloaded`), by `id()`.

    Returns the plain values. Lists and dictionaries are filled in place; numbers, texts and tuples cannot be, and those
    that differ are logged. StateError: an object refused its state.
    """
    values: dict[str, Any] = {}
    names = [name for name in sorted(state, key=lambda name: _load_order(state[name])) if name in tree]
    for turn, name in enumerate(names):
        value, saved = state[name], tree.pop(name)
        try:
            if isinstance(value, PerRank) and _loadable(value.value):
                _load_object(name, value.value, saved, {})
            elif isinstance(value, PerRank):
                with _name_refusals(name, value.value):
                    value.load(saved)
            elif isinstance(value, torch.Tensor):
                if saved is not value:  # a DTensor
                    with writable(value):
                        # A no-op if read in place: torch sees that both are the same memory.
                        value.copy_(saved)
            elif _loadable(value):
                _load_object(name, value, saved, live[name], on_host)
            else:
                values[name] = value if refill(value, saved) else saved
        except StateError as refused:
            raise StateError(f"{refused}; {_describe_progress(names, turn, in_place)}") from refused
    stale = [name for name, value in values.items() if differ(state[name], value)]
    if stale:
        _log.warning(
            "not restored, because the script holds plain values that cannot be changed in place: %s; keep each "
            "in a dictionary of the state, which is, or assign `checkpointer.restored.values[name]` to the state; "
            "otherwise the next checkpoint saves the script's value over it",
            _few(
                [f"{name} is {state[name]!r:.40}, the checkpoint has {values[name]!r:.40}" for name in stale]
            ),
        )
    return values


def _load_order(value: Any) -> int:
    """Order of loading: first objects, since they may refuse; random states last."""
    if isinstance(value.value if isinstance(value, PerRank) else value, RngState):
        return 3
    return 2 if isinstance(value, PerRank) else int(not _loadable(value))


def _describe_progress(names: list[str], refused: int, in_place: Collection[str]) -> str:
    """Say which names this rank had loaded or changed before the name numbered `refused` was refused."""
    rest = names[refused + 1 :]
    parts = [
        ("loaded before it", names[:refused]),
        ("read in place, but not loaded", [name for name in rest if name in in_place]),
        ("not touched", [name for name in rest if name not in in_place]),
    ]
    texts = [f"{what}: {', '.join(map(repr, some))}" for what, some in parts if some]
    return "; ".join([*texts, "do not train on with this state"])


def _load_object(name: str, value: Any, saved: Any, live: Any, on_host: Collection[int] = ()) -> None:
    by_torch, is_optimizer = is_loaded_by_torch(value, saved), isinstance(value, Optimizer)
    rollback = nullcontext() if by_torch else rolled_back_on_error(value, live)
    lists = same_group_lists(value) if is_optimizer else nullcontext()
    with _name_refusals(name, value), rollback:
        optimizers = optimizers_of({name: value})
        casts: AbstractContextManager[list[Optimizer]] = nullcontext([])
        if optimizers:
            casts = uncasting(optimizers, on_host)
        with casts as done, lists, writable(value):
            value.load_state_dict(saved)
        if is_optimizer and not done:
            uncast(value, saved, only_casts=True)  # its own loading may cast as torch's does


@contextmanager
def _name_refusals(name: str, value: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        raise StateError(
            f"{name}: load_state_dict() of {type(value).__name__} refused the saved state: {error}"
        ) from error


def _loadable(value: Any) -> bool:
    return _savable(value) and callable(getattr(value, "load_state_dict", None))


def _savable(value: Any) -> bool:
    return not isinstance(value, PerRank) and callable(getattr(value, "state_dict", None))


def _few(texts: list[str]) -> str:
    more = f"; and {len(texts) - _NAMES_SHOWN} more" if len(texts) > _NAMES_SHOWN else ""
    return "; ".join(texts[:_NAMES_SHOWN]) + more
