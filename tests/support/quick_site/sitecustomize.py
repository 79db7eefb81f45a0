"""On PYTHONPATH of a job: reduces the garbage collector's work at the start and end of its processes.

Importing torch makes objects that live until the end. The collector scans them repeatedly during the import, and again
at exit; that is a third of the CPU of a rank that only starts and ends.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)
