"""State that is split among ranks is saved whole, or refused by name on every rank before its first byte.

DTensors and `Split` say where they belong. Every other split is refused; state changed as the message advises is saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from tests.support.cluster import SMALL, Cluster
from trainer_side.state.per_rank_blob import decode

pytestmark = [pytest.mark.mpi]
_JOB = Path(__file__).with_name("jobs") / "split.py"  # not imported: torch's own modules for it warn
RANKS = 2
SECONDS_MAX = 400
# Far below the minute that a rank waits for a silent one.
REFUSAL_SECONDS_MAX = 30

# kind → words of the message
REFUSED = {
    "fsdp1": ("model is an FSDP1 module", "Use fully_shard (FSDP2)"),
    "fsdp1_orig": ("model is an FSDP1 module", "Use fully_shard (FSDP2)"),
    "fsdp1_sharded": ("model is an FSDP1 module", "Use fully_shard (FSDP2)"),
    "zero_redundancy": ("optimizer is a ZeroRedundancyOptimizer", "optimizer.optim", "PerRank"),
    "dtensor_on_one_rank": ("rank 1", "ema/w"),
    "state_dict_of_one_rank": ("rank 1: state_dict() failed: RuntimeError: the state has not been gathered",),
    "flat_partition": ("optimizer/state/0/exp_avg", "partitioned among the ranks (ZeRO, DeepSpeed, FSDP1)"),
    "flat_partition_of_no_optimizer": ("wrapped/moments/0/exp_avg", "rank 0 and rank 1 differ"),
    "fsdp2_local": ("model/0.weight", "rank 0 and rank 1 differ", "Split(tensor, shape, start)"),
    "tp_plain": ("model/0.weight", "tensor parallelism", "Split(tensor, shape, start)"),
    "pipeline_equal_names": ("model/0.weight", "pipeline stages whose tensors have the same names"),
    "pipeline_one_equal_name": ("model/norm.weight", "rank 0 and rank 1 differ"),
    "pipeline_plain_value": ("rank 1: rank 0 does not have notes/seen", "plain value"),
    "experts": ("model/expert.weight", "expert parallelism", "same_ranks=True"),
    "average_before_ddp": ("average/", "a copy of a model that each rank made", "model/"),
    "one_bit": ("model/weight", "1 of 1 tensors"),
}


class Outcome:
    """Results of one job."""

    def __init__(self, directory: Path, *arguments: str, stager: bool) -> None:
        store = directory / "store"
        env = {} if stager else {"HOLDFAST_STAGER": "own", "HOLDFAST_STORE": str(store)}
        env["HOLDFAST_ON_DIVERGENCE"] = "off"  # a proof of a split must not depend on this setting
        cluster = Cluster(
            directory,
            str(store),
            env,
            script=str(_JOB),
            stager=(*SMALL, "--on-divergence", "off"),
            forked=True,
        )
        with cluster.start(RANKS, *arguments, stager=stager) as job:
            job.succeed(SECONDS_MAX)
            self.output = " ".join(job.output().split())
        cluster.wait_for_flusher()
        self.said: list[dict[str, Any]] = [
            json.loads((cluster.out(1) / f"rank-{rank}.json").read_text()) for rank in range(RANKS)
        ]
        self.out, self.store = cluster.out(1), store
        self.catalog = Catalog(open_store(str(store)))
        self.published = {item.step for item in self.catalog.list()}


@pytest.fixture(scope="module", params=[True, False], ids=["beside a stager", "with one of its own"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Outcome(tmp_path_factory.mktemp("split"), stager=request.param)


@pytest.mark.parametrize("kind", REFUSED)
def test_an_impossible_split_is_refused_by_name_on_every_rank(outcome: Outcome, kind: str) -> None:
    first, *others = (said[kind] for said in outcome.said)
    assert first.get("class") == "StateError", first
    for words in REFUSED[kind]:
        assert words in first["message"]
    for other in others:
        assert (other.get("class"), other["message"]) == ("StateError", first["message"])
    assert all(said[kind]["seconds"] < REFUSAL_SECONDS_MAX for said in outcome.said), (
        "a rank waited for another one"
    )


def test_refused_saves_leave_nothing_in_the_store(outcome: Outcome) -> None:
    assert outcome.published == {100}


def test_state_as_the_messages_advise_is_saved_whole(outcome: Outcome) -> None:
    """State that differs by nature is named once, and saved from rank 0."""
    assert [said["advised"].get("saved") for said in outcome.said] == [True, True], outcome.said
    assert (
        outcome.output.count(
            "only rank 0's value of generator is saved, and other ranks have another value there"
        )
        == 1
    )
    assert "statistics of BatchNorm differ" not in outcome.output.replace("INFO", ""), "that is no warning"
    file = torch.load(outcome.store / "step-000000100.pt", weights_only=True, mmap=True)
    truth = [torch.load(outcome.out / f"truth-{rank}.pt") for rank in range(RANKS)]
    for name in ("sharded", "parallel", "split"):
        whole = truth[0][name]
        assert file[name].keys() == whole.keys()
        assert all(torch.equal(file[name][key], tensor) for key, tensor in whole.items()), name
    moments = file["optimizer"]["state"]
    assert len(moments) == len(truth[0]["moments"])
    for place, expected in truth[0]["moments"].items():
        assert all(torch.equal(moments[place][name], tensor) for name, tensor in expected.items())
    for rank in range(RANKS):
        stage = decode(file["stage"][rank], name="stage")
        expected = truth[rank]["stage"]
        assert all(torch.equal(stage[name], tensor) for name, tensor in expected.items())
