"""On PYTHONPATH of a job: its processes start and end with less work of the garbage collector.

Importing torch makes objects that live until the end. The collector looks at them again and again while they are made,
and once more when the process ends; that is a third of the CPU of a rank that starts and ends.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)
