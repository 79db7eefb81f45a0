"""A folder of a sharded run that is ten times as large as the memory limit of `holdfast import`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from tests.integration.jobs import dcp_fsdp
from tests.integration.test_import import assert_imported, saved_under_fsdp
from tests.support.job import REPOSITORY

_GROWN_BYTES_MAX = 96 << 20
_CHILD = """
import sys
import operator_side.commands.import_state, trainer_side.convert.import_source
from holdfast.command import cli
def memory(field):
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1]) * 1024
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
before = memory("VmRSS")
try:
    cli.main(["import", *sys.argv[1:]])
except SystemExit as ended:
    print(memory("VmHWM") - before, ended.code)
"""


def test_an_imported_folder_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    rows = 10 * _GROWN_BYTES_MAX // (4 * dcp_fsdp.LARGE * dcp_fsdp.COLUMNS) + 1
    folder = saved_under_fsdp(tmp_path, rows=rows)
    command = [sys.executable, "-c", _CHILD, str(folder), str(tmp_path / "run"), "--step", "7"]
    done = subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True, text=True)
    grown_bytes, code = map(int, done.stdout.splitlines()[-1].split())
    assert code == 0, done.stderr
    assert Catalog(open_store(str(tmp_path / "run"))).get().image_bytes > 10 * _GROWN_BYTES_MAX
    assert grown_bytes < _GROWN_BYTES_MAX
    assert_imported(tmp_path, rows)
