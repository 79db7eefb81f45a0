"""The whole of holdfast but its threads, clock, MPI and store, under one seeded scheduler that can do anything.

      seed ──► scheduler ── one event at a time ──► tasks of simulated processes ──► checks after each event
                  │                                      │
      clock, locks, threads, select (runtime.py)         ├ rank: the real Link, a script of our own; the
                  │                                      │   real Copier where copies are torn (copying.py)
      messages and payloads of MPI (transport.py)        ├ stager: the real Service, Session, FlusherLine
      the store (store.py)                               └ flusher: the real `live`: claim, adoption, desk, engine,
      kills, stops, bit flips, full disks (world.py)         pipeline, jobs, progress record, publish, maintenance
                                                         real files and sockets: ring, journal, doorbell, in /dev/shm

What a fake may do is what the real thing may do, and no more: messages between living processes are neither lost nor
doubled, and keep their order on one tag, while tags overtake each other; the store fails before or after it did what it
was asked; a process dies at any event, and at any named point of `holdfast/faultpoint.py`.

    python -m tests.simulation --seed 4711 --trace       one schedule, each event of it
    python -m tests.simulation --first 0 --count 1000    many
    python -m tests.simulation --mutation credit_twice   with a deliberate bug (mutations.py lists them)

Over TCP (`--tcp`) the stager stands alone, and the network is one of its own (tcp_world.py):

    ranks: TcpStagerPort, Connector, PayloadSender ═ tcp_network.py ═ StandingStager, JobListener, TcpTrainersPort
    cut, half-open, slow, refused connections, holes, jobs started again over the last start, a stager started again

    python -m tests.simulation --tcp --first 0 --count 1000
    python -m tests.simulation --tcp --mutation payload_twice    (tcp_mutations.py lists them)

Power failures under the real `PosixStore` have a model of their own: disk.py and test_posix_order.py.
"""
