"""Restore of whole tensors into DTensors of any mesh: every rank in turn, in process groups without other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, debug
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.errors import StateError
from tests.support.restoring import CountingStore, publish
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.restore import restore

RANKS = 4


class Net(nn.Module):
    """Tensors that four ranks cannot split evenly, one with an empty part; tied ones; a buffer."""

    def __init__(self, *, even: bool) -> None:
        super().__init__()
        width = 16 if even else 7
        self.embed = nn.Embedding(24 if even else 23, 8)
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)
        self.brief = nn.Parameter(torch.randn(2, 4))
        self.head = nn.Linear(8, 24 if even else 23, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.randn(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(self.embed(tokens)))) + self.brief.sum()
        out: torch.Tensor = self.head(hidden)
        return out


def _fsdp(net: Net) -> None:
    for module in (net.up, net.down):
        fully_shard(module)
    fully_shard(net)


def _fsdp_brief(net: Net) -> None:
    fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def _columns(net: Net) -> None:
    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % RANKS == 0 else None

    fully_shard(net, shard_placement_fn=place)


def _hsdp(net: Net) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(net, mesh=mesh)


def _tp(net: Net) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (RANKS,)), plan, src_data_rank=None)


def _fsdp_tp(net: Net) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(net, mesh["tp"], plan, src_data_rank=None)
    fully_shard(net, mesh=mesh["dp"])


MESHES: dict[str, tuple[Callable[[Net], None], bool]] = {
    "fsdp": (_fsdp, False),
    "fsdp mixed precision": (_fsdp_brief, False),
    "fsdp by columns": (_columns, True),
    "hsdp": (_hsdp, False),
    "tp": (_tp, True),
    "fsdp and tp": (_fsdp_tp, True),
}


def _forget_as_of_old() -> None:
    """Clear DTensor's caches before torch 2.9, which has no function for that in `debug`."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Make a process group of four that exchanges nothing, and in which only this rank exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    # torch's caches for DTensors contain a mesh, and with it the rank.
    for name in ("_clear_fast_path_sharding_prop_cache", "_clear_python_sharding_prop_cache"):
        getattr(debug, name, _forget_as_of_old)()
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(*, even: bool) -> tuple[Net, torch.optim.AdamW]:
    """Return a plain model after two steps."""
    torch.manual_seed(1)
    net = Net(even=even)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randint(0, 20, (5,))).square().sum().backward()
        optimizer.step()
    return net, optimizer


def _locals(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in module.state_dict().items()
    }


def _addresses(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in _locals(module).items()}


def _assert_locals(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("stepped", [False, True], ids=["before its first step", "with moments"])
def test_a_plain_file_comes_back_in_parts(tmp_path: Path, kind: str, stepped: bool) -> None:
    shard, even = MESHES[kind]
    net, optimizer = trained(even=even)
    publish(tmp_path, 5, {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, chunk_bytes=4096)
    for rank in range(RANKS):
        with as_rank(rank):
            torch.manual_seed(2)
            live = Net(even=even)
            shard(live)
            moments = torch.optim.AdamW(live.parameters(), lr=0.5)
            if stepped:
                for parameter in live.parameters():
                    parameter.grad = torch.ones_like(parameter)
                moments.step()
            # FSDP2 of torch 2.7 pads uneven parts again after a module has loaded a state, which moves them.
            live.load_state_dict(live.state_dict())
            moved = _addresses(live)
            live.load_state_dict(live.state_dict())
            before = _addresses(live)
            state = {"model": live, "optimizer": moments}
            restore(state, CountingStore(tmp_path), LonePeers(), events=None)
            # The parts of the trained model itself, split by torch.
            torch.manual_seed(1)
            same = Net(even=even)
            same.load_state_dict(net.state_dict())
            shard(same)
            _assert_locals(_locals(live), _locals(same))
            assert _addresses(live) == before or moved != before
            assert moments.param_groups[0]["lr"] == 0.01
            for key in ("exp_avg", "exp_avg_sq"):
                _assert_moments(moments, optimizer, key, net, shard, even=even)


def _assert_moments(
    found: torch.optim.AdamW,
    plain: torch.optim.AdamW,
    key: str,
    net: Net,
    shard: Callable[[Net], None],
    *,
    even: bool,
) -> None:
    expected = Net(even=even)
    for parameter, trained_one in zip(expected.parameters(), net.parameters(), strict=True):
        with torch.no_grad():
            parameter.copy_(plain.state[trained_one][key])
    shard(expected)
    for parameter, of_it in zip(expected.parameters(), found.param_groups[0]["params"], strict=True):
        moment = found.state[of_it][key]
        assert type(moment) is type(of_it.detach())
        assert int(found.state[of_it]["step"]) == 2
        if isinstance(moment, DTensor):
            assert isinstance(parameter, DTensor)
            assert moment.placements == parameter.placements
            moment, parameter = moment.to_local(), parameter.to_local()  # type: ignore[assignment]
        assert torch.equal(moment, parameter.detach())


def test_moments_keep_the_dtype_in_which_they_were_saved(tmp_path: Path) -> None:
    net, optimizer = trained(even=True)
    publish(tmp_path, 5, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    with as_rank(1):
        live = Net(even=True).to(torch.bfloat16)
        _fsdp(live)
        moments = torch.optim.AdamW(live.parameters())
        restore({"model": live, "optimizer": moments}, CountingStore(tmp_path), LonePeers(), events=None)
        moment = moments.state[live.up.weight]["exp_avg"]
        assert moment.dtype == torch.float32
        assert torch.equal(moment.to_local(), optimizer.state[net.up.weight]["exp_avg"][4:8])
        up = live.up.weight
        assert isinstance(up, DTensor)
        assert torch.equal(up.to_local(), net.up.weight[4:8].to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_a_split_model_that_refuses_stays_unchanged(tmp_path: Path, kind: str) -> None:
    shard, even = MESHES[kind]
    net, optimizer = trained(even=even)
    publish(tmp_path, 5, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})

    def refuse(*_: Any) -> None:
        raise ValueError("not this one")

    with as_rank(1):
        live = Net(even=even)
        shard(live)
        moments = torch.optim.AdamW(live.parameters())
        for parameter in live.parameters():
            parameter.grad = torch.ones_like(parameter)
        moments.step()
        up: Any = live.up
        handles = [up.register_load_state_dict_post_hook(refuse)]
        handles.append(moments.register_load_state_dict_post_hook(refuse))
        before = {name: tensor.clone() for name, tensor in _locals(live).items()}
        averages = [moments.state[one]["exp_avg"].clone() for one in live.parameters()]
        for state in ({"model": live}, {"optimizer": moments}):
            with pytest.raises(StateError, match="not this one"):
                restore(state, CountingStore(tmp_path), LonePeers(), events=None)
        _assert_locals(_locals(live), before)
        for kept, parameter in zip(averages, live.parameters(), strict=True):
            held = moments.state[parameter]["exp_avg"]
            assert torch.equal(*(one.to_local() if isinstance(one, DTensor) else one for one in (held, kept)))
        for handle in handles:
            handle.remove()
        hooked = up.register_load_state_dict_post_hook(lambda *_: None)
        restore({"model": live, "optimizer": moments}, CountingStore(tmp_path), LonePeers(), events=None)
        hooked.remove()
        same = Net(even=even)
        same.load_state_dict(net.state_dict())
        shard(same)
        _assert_locals(_locals(live), _locals(same))
        _assert_moments(moments, optimizer, "exp_avg", net, shard, even=even)


def test_a_split_model_takes_a_file_of_another_wrapper_in_place(tmp_path: Path) -> None:
    net, _ = trained(even=True)
    names = {f"module._orig_mod.{name}": tensor for name, tensor in net.state_dict().items()}
    publish(tmp_path, 5, {"model": names})
    with as_rank(1):
        live = Net(even=True)
        _fsdp(live)
        live.load_state_dict(live.state_dict())
        before = _addresses(live)
        restore({"model": live}, CountingStore(tmp_path), LonePeers(), events=None)
        same = Net(even=True)
        same.load_state_dict(net.state_dict())
        _fsdp(same)
        _assert_locals(_locals(live), _locals(same))
        assert _addresses(live) == before


def test_a_dtensor_anywhere_in_plain_values(tmp_path: Path) -> None:
    whole = torch.arange(40.0).reshape(8, 5)
    publish(tmp_path, 5, {"ema": {"w": whole, "n": 3}, "one": whole, "both": whole * 2})
    with as_rank(3):
        mesh = init_device_mesh("cpu", (RANKS,))
        parts = [DTensor.from_local(torch.zeros(2, 5), mesh, [Shard(0)], run_check=False) for _ in range(2)]
        both = DTensor.from_local(torch.zeros(8, 5), mesh, [Replicate()], run_check=False)
        ema: dict[str, Any] = {"w": parts[0], "n": 0}
        state = {"ema": ema, "one": parts[1], "both": both}
        restore(state, CountingStore(tmp_path), LonePeers(), events=None)
        assert ema["w"] is parts[0]
        assert ema["n"] == 3
        for part in parts:
            assert torch.equal(part.to_local(), whole[6:])
        assert torch.equal(both.to_local(), whole * 2)


def test_a_sum_that_is_not_made_yet_is_refused_by_name(tmp_path: Path) -> None:
    publish(tmp_path, 5, {"ema": {"w": torch.ones(8, 5)}})
    with as_rank(0):
        mesh = init_device_mesh("cpu", (RANKS,))
        part = DTensor.from_local(torch.zeros(8, 5), mesh, [Partial()], run_check=False)
        with pytest.raises(
            StateError, match=r"ema/w is a DTensor with the placement .*redistribute it first"
        ):
            restore({"ema": {"w": part}}, CountingStore(tmp_path), LonePeers(), events=None)


def test_another_whole_shape_is_refused_by_name(tmp_path: Path) -> None:
    net, _ = trained(even=True)
    publish(tmp_path, 5, {"model": net.state_dict()})
    with as_rank(0):
        live = Net(even=False)
        _fsdp(live)
        with pytest.raises(
            StateError, match=r"model/up.weight: expected \[7, 8\], the checkpoint has \[16, 8\]"
        ):
            restore({"model": live}, CountingStore(tmp_path), LonePeers(), events=None)
