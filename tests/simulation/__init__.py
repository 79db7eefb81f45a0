"""All of holdfast except its threads, clock, MPI and store, under one seeded scheduler that injects every fault.

      seed ──► scheduler ── one event at a time ──► tasks of simulated processes ──► checks after each event
                  │                                      │
      clock, locks, threads, select (runtime.py)         ├ rank: the real Link, a script of our own; the
                  │                                      │   real Copier where copies are torn (copying.py)
      messages and payloads of MPI (transport.py)        ├ stager: the real Service, Session, FlusherConnection
      the store (store.py)                               └ flusher: the real `run_flusher`: claim, adoption, engine,
      kills, stops, bit flips, full disks (world.py)         pipeline, jobs, progress record, publish, maintenance
                                                         real files and sockets: ring, journal, doorbell, in /dev/shm

A fake may do exactly the things that the real part may do. Messages between living processes are neither lost nor
doubled, and keep their order on one tag, while tags overtake each other. The store fails before or after an operation
takes effect. A process dies at any event, and at any named point of `holdfast/faultpoint.py`.

    python -m tests.simulation --seed 4711 --trace       one schedule, each event of it
    python -m tests.simulation --first 0 --count 1000    many
    python -m tests.simulation --mutation credit_twice   with a deliberate bug (mutations.py lists them)

Over TCP (`--tcp`) the stager is a standing one, and the simulation has a network of its own (tcp_world.py):

    ranks: TcpStagerPort, Connector, PayloadSender ═ tcp_network.py ═ StandingStager, JobListener, TcpTrainersPort
    cut, half-open, slow, refused connections, stalled networks, restarts of a job over its last start, stager restarts

    python -m tests.simulation --tcp --first 0 --count 1000
    python -m tests.simulation --tcp --mutation payload_twice    (tcp_mutations.py lists them)

Power failures under the real `PosixStore` have a model of their own: disk.py and test_posix_order.py.
"""
