"""The contract leaf of holdfast: everything two roles must agree on, defined once.

No torch, no MPI, and no import of the three roles (`trainer_side`, `stager`, `flusher`), so that each of them can
crash, be upgraded and be tested alone, and the command-line tools work where neither torch nor MPI is installed.

the image      layout, layout_index   where every byte lies, and which rank sends it      crc, chunkwork   its sums
               slices, slice_sets, assembly   one rank's share of it, in tiers and store; put together again
the transfer   wire       frames between trainers and stager      agreement, replicas   do all ranks hold the same?
               session    the stager's view, as a pure state machine: session_steps what goes in and out,
                          session_admission which offers are taken, session_slots the ring's slots, session_checkpoint
on the node    ring, journal   chunks in shared memory            ipc, runtime   stager and flusher; where it all lies
               keeper     `holdfast run` wants the ring to stay
in the store   storage/   POSIX, S3, fsspec    manifest, sealed, publish   what makes a checkpoint exist
               claim      one writer           catalog, verify    which there are, and are they good
one step       notices/   step_agreement, messages   all ranks act at one step
               decider, notice, worth     one checkpoint of all ranks before a machine goes
               sparing    which ranks then send only what they alone have
how often      policy/    what to advise          pace   what travels about it
for everybody  config, errors, events, faultpoint       causes, metrics, metrics_page   why not, counted, served
people         cli, commands/, doctor/, launch, supervise/ (`holdfast run`), cluster/ (machines on AWS)
"""

__version__ = "0.1.0"
