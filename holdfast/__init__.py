"""The contract leaf of holdfast: everything two roles must agree on, defined once.

No torch, no MPI, and no import of the three roles (`trainer_side`, `stager`, `flusher`), so that each of them can
crash, be upgraded and be tested alone, and the command-line tools work where neither torch nor MPI is installed.

    layout   ─ where every byte of the image lies, and which rank sends it
    wire     ─ the frames between trainers and stager        session ─ the transfer as a pure state machine
    ring     ─ chunks and journal in shared memory           ipc     ─ what stager and flusher tell each other
    manifest ─ the commit record of one checkpoint           catalog ─ which checkpoints a run holds, and are they good
    storage  ─ POSIX, S3 and fsspec behind one interface     config, errors, events, cli
"""

__version__ = "0.1.0"
