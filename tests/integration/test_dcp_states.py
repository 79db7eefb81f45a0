"""State of torch.distributed.checkpoint's users: killed, resumed, and one file of whole tensors, bit for bit.

Their objects have `get_state_dict()` with `StateDictOptions`, or describe their part by `__create_chunk_list__()`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import SMALL, Cluster, kill_ranks

pytestmark = [pytest.mark.mpi]
_JOB = Path(__file__).with_name("jobs") / "dcp_states.py"  # not imported: torch's own modules for it warn
SECONDS_MAX, STEPS, PAUSE_AT = 240, 4, 1
_COMPARE = """
import sys, torch
from pathlib import Path
assert not any(name.partition(".")[0] in ("holdfast", "trainer_side") for name in sys.modules)
def leaves(value, path=""):
    if isinstance(value, (dict, list, tuple)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{path}/{key}")
    else:
        yield path, value
store, truths = map(Path, sys.argv[1:])
for file in sorted(store.glob("step-*.pt")):
    mine, truth = (
        dict(leaves(torch.load(path, weights_only=True))) for path in (file, truths / f"{int(file.name[5:14])}.pt")
    )
    assert mine.keys() == truth.keys(), mine.keys() ^ truth.keys()
    for path, one in mine.items():
        other = truth[path]
        same = torch.equal(one, other) and one.dtype == other.dtype if torch.is_tensor(one) else one == other
        assert same, (file.name, path)
    print(int(file.name[5:14]), *sorted(path for path in mine if "embed" in path or "rows" in path))
"""
_SAVED = [
    "/flat/net/embed.weight",
    "/flat/optimizer/param_groups.embed.weight.lr",
    "/flat/optimizer/state.embed.weight.exp_avg",
    "/nested/net/embed.weight",
    "/nested/optimizer/state/embed.weight/exp_avg",
    "/table/rows",
]


def test_states_of_dcp_are_killed_resumed_and_whole_in_the_file(tmp_path: Path) -> None:
    store, truths = tmp_path / "store", tmp_path / "truths"
    truths.mkdir()
    env = {"HOLDFAST_ON_FULL": "wait"}
    cluster = Cluster(tmp_path, str(store), env, script=str(_JOB), stager=SMALL, forked=True)

    def compared() -> dict[int, list[str]]:
        command = [sys.executable, "-c", _COMPARE, str(store), str(truths)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return {int(line.split()[0]): line.split()[1:] for line in done.stdout.splitlines()}

    with cluster.start(2, str(STEPS), str(truths), "-1") as job:
        job.succeed(SECONDS_MAX)
    cluster.wait_for_flusher()
    shutil.move(truths, tmp_path / "undisturbed")
    shutil.rmtree(store)
    truths.mkdir()
    with cluster.start(2, str(STEPS), str(truths), str(PAUSE_AT)) as job:
        kill_ranks(cluster, job, 2, 2, saved=PAUSE_AT)
        job.wait(SECONDS_MAX)
    cluster.wait_for_flusher()
    with cluster.start(2, str(STEPS), str(truths), "-1") as job:
        job.succeed(SECONDS_MAX)
    cluster.wait_for_flusher()
    restored = json.loads((cluster.out(3) / "restored.json").read_text())
    assert restored == {"step": PAUSE_AT, "differ": []}
    # Each file equals the state that torch gathered in the resumed job, and in the uninterrupted one.
    files = compared()
    assert set(files) == {*range(STEPS)}
    assert all(set(_SAVED) <= {*paths} for paths in files.values())
    shutil.rmtree(truths)
    shutil.move(tmp_path / "undisturbed", truths)
    assert set(compared()) == {*range(STEPS)}
