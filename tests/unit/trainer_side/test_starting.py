"""A training process imports nothing that only other stores, tiers, clouds or launchers need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_RUN_SECONDS_MAX = 60

# holdfast must not import these into a training process; a script that uses some imports them itself.
_PACKAGES = (
    *("aiohttp", "boto3", "botocore", "fsspec", "opentelemetry", "prometheus_client", "tenacity"),
    *("click", "rich", "safetensors", "transformers", "lightning", "accelerate"),
    *("numpy.typing", "torch.distributed.checkpoint", "torch.distributed.tensor"),
)
_ROOMS = (
    *(
        "holdfast.command",
        "holdfast.policy",
        "holdfast.store.s3",
        "holdfast.store.generic",
        "holdfast.wire.layout_round",
    ),
    *("trainer_side.convert", "trainer_side.frameworks", "trainer_side.pace.pacer"),
    *(
        "trainer_side.notice.aws",
        "trainer_side.notice.azure",
        "trainer_side.notice.gcp",
        "trainer_side.notice.http",
    ),
)
_OF_TIERS = (
    "trainer_side.tiers.local_tiers",
    "trainer_side.tiers.commit_votes",
    "trainer_side.tiers.rank0_preemption",
)
_OF_LAUNCHERS = (
    "mpi4py",
    "trainer_side.ranks.mpi_world",
    "trainer_side.ranks.c10d_world",
    "holdfast.net.tls",
)


def loaded_by(script: str, **environment: str) -> set[str]:
    """Return the modules that a process imports for `script`, beyond torch's own."""
    lines = (
        "import json, sys, torch, torch.distributed",
        "before = set(sys.modules)",
        script,
        "print(json.dumps(sorted(set(sys.modules) - before)))",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "OMPI_"))}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=_RUN_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def of_these(loaded: set[str], names: tuple[str, ...]) -> list[str]:
    return sorted(name for name in loaded if any(f"{name}.".startswith(f"{given}.") for given in names))


def test_the_checkpointer_loads_no_other_store_tier_cloud_or_launcher() -> None:
    loaded = loaded_by("from holdfast import Checkpointer")
    assert "trainer_side.checkpointer" in loaded
    assert of_these(loaded, (*_PACKAGES, *_ROOMS, *_OF_TIERS, *_OF_LAUNCHERS)) == []


def test_a_rank_of_torchrun_with_a_directory_for_a_store_loads_no_other(tmp_path: Path) -> None:
    script = f"""
from holdfast.config import TrainerConfig
from trainer_side import Checkpointer
config = TrainerConfig(store={(tmp_path / "run").as_uri()!r}, tiers=("memory",))
with Checkpointer({{"weight": torch.zeros(4)}}, every=1, config=config) as checkpointer:
    assert checkpointer.restore() == 0
"""
    loaded = loaded_by(script, RANK="0", WORLD_SIZE="1")
    assert {*_OF_TIERS, "trainer_side.ranks.c10d_world"} <= loaded
    beside = ("mpi4py", "trainer_side.ranks.mpi_world")
    unused = tuple(
        name for name in _ROOMS if name != "holdfast.wire.layout_round"
    )  # the tiers' council agrees by itself
    assert of_these(loaded, (*_PACKAGES, *unused, *beside)) == []
