"""A digest has the step's inputs: positions in the data, batch, drawn random numbers, rates, loss."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import PerRank, ResumableSampler, RngState
from holdfast.image.proof_record import DIGEST_BYTES_MAX
from trainer_side.proof.digest_taker import DigestTaker, StepInput, generator_crcs
from trainer_side.proof.step_digest import StepDigest

NOTHING = StepInput()


def taken(taker: DigestTaker, given: StepInput = NOTHING, *, is_marked: bool | None = True) -> StepDigest:
    return taker.take(5, given, is_marked=is_marked).digest()


def test_the_place_of_a_sampler_is_that_of_the_mark_and_now() -> None:
    sampler = ResumableSampler(10, seed=0, rank=0, ranks=2)
    taker, batches = DigestTaker({"data": sampler}), sampler.batches(2)
    next(batches)
    taker.mark()
    next(batches)
    assert taken(taker).data == {"data": {"from": [0, 4], "to": [0, 8]}}
    assert taken(taker, is_marked=False).data == {"data": {"to": [0, 8]}}
    sampler.load_state_dict(sampler.state_dict())
    assert taken(taker, is_marked=None).data == {"data": {"from": [0, 8], "to": [0, 8]}}


@pytest.mark.parametrize(
    ("draw", "generator"),
    [(functools.partial(torch.rand, 1), "torch"), (np.random.rand, "NumPy"), (random.random, "Python")],
)
def test_only_generators_that_the_step_has_drawn_from_are_kept(draw: Any, generator: str) -> None:
    taker = DigestTaker({})
    taker.mark()
    assert taken(taker).generators == {}
    draw()
    assert taken(taker).generators == {generator: generator_crcs()[generator]}
    assert set(taken(taker, is_marked=None).generators) == {"torch", "NumPy", "Python"}
    assert taken(taker, is_marked=False).generators == {}, "nobody knows which were drawn from"


def test_saved_generators_are_all_kept() -> None:
    taker = DigestTaker({"rng": PerRank(RngState())})
    taker.mark()
    assert taken(taker).generators == generator_crcs()
    assert taken(taker, is_marked=False).generators == generator_crcs()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_batch_counts_by_its_contents() -> None:
    taker = DigestTaker({})

    def crc(batch: Any) -> int | None:
        return taken(taker, StepInput(batch)).batch

    batch = {"x": torch.arange(6).reshape(2, 3), "y": [np.ones(2), "text", 3]}
    same = {"x": torch.arange(6).reshape(2, 3).clone(), "y": [np.ones(2), "text", 3]}
    assert crc(batch) == crc(same)
    for other in (
        {**same, "x": torch.arange(6).reshape(2, 3) + 1},
        {**same, "y": [np.zeros(2), "text", 3]},
        {**same, "y": [np.ones(2), "test", 3]},
        {**same, "y": [np.ones(2), "text", 4]},
    ):
        assert crc(other) != crc(batch)
    assert crc([1, object()]) == crc([1, object()]), "an address is no content"
    for unknown in (
        None,
        object(),
        [None],
        [object()],
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse_csr(),
    ):
        assert crc(unknown) is None, "nothing was compared, so nothing may be said to be equal"


def test_a_batch_may_be_a_dataclass_or_sparse() -> None:
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        more: Any = None

    def crc(batch: Any) -> int | None:
        return taken(DigestTaker({}), StepInput(batch)).batch

    batches: list[Any] = [
        Batch(torch.zeros(2)),
        Batch(torch.ones(2)),
        Batch(torch.zeros(2), [Batch(torch.ones(1))]),
    ]
    batches += [torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), torch.eye(2).flip(0).to_sparse()]
    found = [crc(batch) for batch in batches]
    assert None not in found
    assert len(set(found)) == len(batches)
    assert found == [crc(copy.deepcopy(batch)) for batch in batches]


def test_rates_and_losses_may_be_tensors() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [{"params": [one], "lr": lr} for one, lr in zip(parameters, (0.5, 0.5, 0.25), strict=True)]
    groups[2]["lr"] = torch.tensor(0.25)
    digest = taken(
        DigestTaker({"optimizer": torch.optim.SGD(groups)}),
        StepInput(loss=torch.tensor([1.5], requires_grad=True), grad_norm=2),
    )
    assert digest.rates == {"optimizer": (0.5, 0.25)}
    assert (digest.loss, digest.grad_norm) == (1.5, 2.0)
    assert taken(DigestTaker({}), StepInput(loss=torch.ones(2))).loss is None, "no single number"


def test_a_digest_has_the_classes_of_optimizers_and_schedulers() -> None:
    """RAdam, for one, loads the state of Adam, and its first loss is the same."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.RAdam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    chained = torch.optim.lr_scheduler.ChainedScheduler([scheduler])
    state = {
        "model": model,
        "optimizer": PerRank(optimizer),
        "scheduler": scheduler,
        "all": chained,
        "note": [1],
    }
    assert taken(DigestTaker(state)).classes == {
        "optimizer": "RAdam",
        "scheduler": "StepLR",
        "all": "ChainedScheduler of StepLR",
    }


def test_a_loss_is_that_of_its_moment() -> None:
    loss = torch.tensor(1.0)
    digest = DigestTaker({}).take(5, StepInput(loss=loss), is_marked=True)
    loss.fill_(9.0)
    assert digest.ready
    assert digest.digest().loss == 1.0


def test_a_digest_of_a_large_state_fits_a_message() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    state: dict[str, Any] = {"rng": RngState()}
    for number in range(50):
        state[f"{'optimizer' * 30}{number}"] = torch.optim.SGD([parameter], lr=1 / 3)
        state[f"{'sampler' * 30}{number}"] = ResumableSampler(10**15, seed=1, rank=0, ranks=1)
    told = json.dumps(taken(DigestTaker(state), StepInput(loss=1 / 3)).to_json())
    assert len(told) < DIGEST_BYTES_MAX
