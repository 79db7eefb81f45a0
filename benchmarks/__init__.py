"""Peers side by side on one machine, in one run: every figure that the documentation quotes comes from here.

    __main__ ─ command line    schedule ─ jobs, warm-up, rounds    report ─ ratios, spread, tables, JSON
       hub   ─ orders to the ranks, answers back (a Unix socket; the ranks sleep between orders)
       rank  ─ one training rank: workload + peers/{holdfast,torch_save,dcp}
       raw_mpi, raw_direct ─ what the machine can do at best
    memory, machine     ─ bytes, CPU, shape of the machine

A round runs every peer once, in an order that turns from round to round; a ratio is made within one round, so
that what the machine does to everybody at that moment cancels out. Between two turns no peer has work left:
holdfast has read its checkpoint back, files are deleted, nothing is dirty.
"""
