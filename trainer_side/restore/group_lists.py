"""Keeps the lists of an optimizer's groups the same objects while a saved state is loaded.

`Optimizer.load_state_dict` replaces `param_groups` by a new list of new dictionaries. A wrapper that has taken the list
for its own (LARC, Lookahead) then goes on with the groups of before: its learning rates are not those of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from trainer_side.state.tree import with_inner


@contextmanager
def same_group_lists(optimizer: Optimizer) -> Iterator[None]:
    """While a state is loaded into `optimizer`, and into those that it wraps. Training thread.

    Optimizers with a `load_state_dict` of their own are left alone: only they know what refers to their groups.
    """
    together = with_inner([optimizer])
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
            for member, group in zip(members, loaded, strict=True):
                if member is not group:
                    fresh = dict(group)
                    member.clear()
                    member.update(fresh)
            groups[:] = members
            kept[id(loaded)] = groups
        one.param_groups = kept[id(loaded)]
