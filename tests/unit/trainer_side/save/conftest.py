"""A process that acts as one of two ranks, for tensors that are split among them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """For two ranks; nothing is really exchanged with the other one."""
    store = FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def on_mesh(mesh: DeviceMesh, whole: torch.Tensor, placement: Placement | None = None) -> DTensor:
    """A whole tensor as each rank has its part of it: by rows, if nothing else is said."""
    # A copy: a rank's part is a view in torch before 2.11, and an optimizer may write into its gradients.
    return distribute_tensor(whole.detach().clone(), mesh, [placement or Shard(0)], src_data_rank=None)
