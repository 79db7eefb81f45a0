"""torch.distributed.checkpoint loads an export in a process without holdfast; slow, as imports take seconds."""

from __future__ import annotations

from tests.unit.trainer_side.convert import test_dcp as exported

_run = exported._run
test_dcp_itself_loads_what_was_exported_without_holdfast = exported.check_dcp_itself_loads_what_was_exported
