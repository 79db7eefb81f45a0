"""A plain data-parallel script, as people have them: `python plain_ddp.py OUT`. Nothing of holdfast is in it.

tests/integration/test_init.py puts the lines of `holdfast init` into a copy of it: in place of a line that ends with
`# init (2)`, or where `# init (1)` stands alone.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as people do
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# init (1)


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group(backend="gloo")  # init (2)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(96, 16))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data, num_replicas=world, rank=rank, seed=3
    )
    loader = DataLoader(
        data,
        batch_size=8,
        sampler=sampler,
        # init (7)
    )
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    torch.manual_seed(100 + rank)
    log = (out / f"losses-{rank}").open("a")
    (out / f"pid-{rank}").write_text(str(os.getpid()))

    epochs = 3
    # init (3)
    for epoch in range(epochs):  # init (5)
        sampler.set_epoch(epoch)
        for batch in loader:  # init (6)
            (x,) = batch
            optimizer.zero_grad()
            loss = ((model(x) - x) ** 2).mean()
            loss.backward()
            optimizer.step()
            log.write(json.dumps([epoch, float(x.sum()), loss.item().hex()]) + "\n")
            log.flush()
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))  # the work of a larger model
            # init (8)
        scheduler.step()
    # init (9)
    torch.save(model.state_dict(), out / f"final-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
