"""On PYTHONPATH of a process: it takes itself for one on the host that TEST_HOST names."""

import os
import platform

platform.node = lambda: os.environ["TEST_HOST"]
