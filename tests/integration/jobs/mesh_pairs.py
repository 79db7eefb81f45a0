"""Restores checkpoints of other jobs, each saved on its own mesh, onto several meshes of this job's ranks in turn.

    python mesh_pairs.py OUT RUNS CASE…      CASE: see sharded.py; its runs: RUNS/NAME/store, RUNS/NAME/truths

Each restore gets a new net with other values. Rank 0 writes `OUT/pairs.json`: run, mesh, and the values that differ
from the state that torch gathered when the run was saved.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.config import TrainerConfig
from holdfast.store import open_store
from tests.integration.jobs.sharded import MESHES, Experts, Net, by_name, differences, state_of_all_ranks
from trainer_side import PerRank, RngState, init_torch_distributed
from trainer_side.ranks.joined import join_world
from trainer_side.restore.restore import restore


def main() -> None:
    out, runs, cases = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    rank, ranks = init_torch_distributed("gloo")
    peers = join_world(TrainerConfig()).peers()
    torch.set_num_threads(1)
    pairs: dict[str, list[str]] = {}
    for case in cases:
        for run in sorted(runs.iterdir()):
            torch.manual_seed(len(pairs) + 100)
            net = Net()
            MESHES[case](net, ranks)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1.0, foreach=False)
            experts = Experts.of(rank, ranks)
            experts.part.tensor.fill_(-1)
            state = {"net": net, "optimizer": optimizer, "experts": {"up": experts.part}}
            restored = restore(
                {**state, "rng": PerRank(RngState())}, open_store(str(run / "store")), peers, events=None
            )
            assert restored is not None
            found = state_of_all_ranks(case, net, optimizer, experts)
            truth = torch.load(run / "truths" / f"{restored.step}.pt", weights_only=True)
            pairs[f"{run.name} onto {case}"] = differences(by_name(found), by_name(truth))
    if rank == 0:
        out.mkdir()
        (out / "pairs.json").write_text(json.dumps(pairs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
