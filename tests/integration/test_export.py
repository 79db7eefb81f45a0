"""What torch.distributed.checkpoint does with an export, in a process without holdfast: seconds of imports alone."""

from __future__ import annotations

from tests.unit.trainer_side.convert import test_dcp as exported

_run = exported._run
test_dcp_itself_loads_what_was_exported_without_holdfast = exported.check_dcp_itself_loads_what_was_exported
