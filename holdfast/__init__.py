"""The contract leaf of holdfast: everything that two roles must agree on, defined once.

It imports no torch, no MPI, and none of the four packages above it (`trainer_side`, `stager`, `flusher`,
`operator_side`). So each role can crash, be upgraded and be tested alone, and the command-line tools work where neither
torch nor MPI is installed.

image/         where every byte of a checkpoint is, and which rank sends it: layout, chunks, slices, manifest, replicas
ring/          the shared memory between stager and flusher: ring, journal, directory, doorbell, remains
wire/          the messages between training ranks and stager: frames, and how the ranks agree on a layout
notices/       preemption notices: whether a step is worth saving, and how all ranks save the same one
store/         where checkpoints go: POSIX, S3 and fsspec behind one interface, with retries
checkpoints/   which checkpoints a store has: publishing, the claim of the one writer, catalog, slice sets, assembly
telemetry/     what a running process tells: events, metrics, spans, status
policy/        the arithmetic of `every="auto"` and `holdfast tune`: cost, interval, governor, advice
command/       the frame of the `holdfast` command: entry point, output, help, places of files

errors, config         the public errors and settings       crc, sealed     checksums, and JSON documents with one
parse_cost             what parsing a document would cost
supervised, mpirun     lines from a job to its supervisor, and the mpirun command line
process, faultpoint    CPU priority, and the named points at which tests kill a process
"""

__version__ = "0.1.0"
