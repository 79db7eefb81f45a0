"""On PYTHONPATH of a process: makes it believe that it runs on the host TEST_HOST, and imports TEST_ALSO."""

import importlib
import os
import platform

platform.node = lambda: os.environ["TEST_HOST"]
if "TEST_ALSO" in os.environ:
    importlib.import_module(os.environ["TEST_ALSO"])
