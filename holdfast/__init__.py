"""The import for scripts, and the contract: everything that two roles must agree on, defined once.

    from holdfast import Checkpointer

Scripts import their names from this file, which loads each module on first use. Apart from it and `integrations`, this
package imports no torch, no MPI, and none of the four packages above it (`trainer_side`, `stager`, `flusher`,
`operator_side`). Each role can therefore crash, be upgraded and be tested alone, and the command-line tools work
without torch and MPI.

image/         where every byte of a checkpoint is, and which rank sends it: layout, chunks, slices, manifest, replicas
ring/          the shared memory between stager and flusher: ring, journal, directory, doorbell, remains
wire/          the messages between training ranks and stager: frames, and how the ranks agree on a layout
net/           a TCP connection between a rank and its stager, without sockets: handshake, TLS, message lines, payloads
notices/       preemption notices: whether a step is worth saving, and how all ranks save the same one
store/         where checkpoints go: POSIX, S3 and fsspec behind one interface, with retries
checkpoints/   which checkpoints a store has: publishing, the claim of the one writer, catalog, images
telemetry/     what a running process reports: events, metrics, spans, status
notify/        messages to people about a run: webhooks, commands
policy/        the arithmetic of `every="auto"` and `holdfast tune`: cost, interval, governor, advice
command/       the frame of the `holdfast` command: entry point, output, help, arguments that name a checkpoint
integrations/  trainer_side/frameworks under public names: Lightning, Trainer, Accelerate, torchtitan, trackers

errors, config           the public errors and settings
setting_values, config_sources    parsing of setting values; the sources of settings and their order
crc, sealed              checksums, and JSON documents with a checksum
parse_cost, pickle_cost  the memory that parsing a document or a pickle takes, estimated before parsing
supervised, mpirun       lines from a job to its supervisor, and the mpirun command line
lost_peer                recognizes exceptions that mean a lost process of the job
stager_key, own_stager   the key that a stager outside MPI shares with its ranks; the note of a job's own stager
log_files                log files of background processes
process, faultpoint      this process's priority, memory and exit; named points at which tests kill a process
lazy, extras             names imported on first use, and what to install if a package is missing
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast import integrations
    from holdfast.config import TrainerConfig
    from holdfast.errors import (
        BusyError,
        ConfigError,
        DamageError,
        FencedError,
        HoldfastError,
        NotDurable,
        PeerLost,
        ProtocolError,
        ResumeDiffers,
        StateError,
        StoreError,
        StoreMissing,
    )
    from holdfast.notices.notice import Notice
    from trainer_side import (
        Checkpointer,
        PerRank,
        ResumableDraw,
        ResumableSampler,
        ResumableStream,
        RngState,
        SeededSamples,
        Split,
        init_torch_distributed,
    )
    from trainer_side.ledger import Stats
    from trainer_side.restore.restore_attempt import Restored
else:
    from holdfast.lazy import lazy_names

    _MODULES = {
        "holdfast.config": ("TrainerConfig",),
        "holdfast.errors": (
            "BusyError",
            "ConfigError",
            "DamageError",
            "FencedError",
            "HoldfastError",
            "NotDurable",
            "PeerLost",
            "ProtocolError",
            "ResumeDiffers",
            "StateError",
            "StoreError",
            "StoreMissing",
        ),
        "holdfast.notices.notice": ("Notice",),
        "trainer_side": (
            "Checkpointer",
            "PerRank",
            "ResumableDraw",
            "ResumableSampler",
            "ResumableStream",
            "RngState",
            "SeededSamples",
            "Split",
            "init_torch_distributed",
        ),
        "trainer_side.ledger": ("Stats",),
        "trainer_side.restore.restore_attempt": ("Restored",),
    }
    __getattr__, __dir__ = lazy_names(__name__, _MODULES, submodules=("integrations",))

__all__ = [
    "BusyError",
    "Checkpointer",
    "ConfigError",
    "DamageError",
    "FencedError",
    "HoldfastError",
    "NotDurable",
    "Notice",
    "PeerLost",
    "PerRank",
    "ProtocolError",
    "Restored",
    "ResumableDraw",
    "ResumableSampler",
    "ResumableStream",
    "ResumeDiffers",
    "RngState",
    "SeededSamples",
    "Split",
    "StateError",
    "Stats",
    "StoreError",
    "StoreMissing",
    "TrainerConfig",
    "__version__",
    "init_torch_distributed",
    "integrations",
]
