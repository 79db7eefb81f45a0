"""`make demo`: kills training ranks without notice; a fresh cluster continues as if nothing had happened.

story.py ── runs the demo: reference run · run until killed · fresh cluster
   ├─ job.py      one launcher: start it, follow its progress, kill its training ranks, find leftovers
   ├─ store.py    watches the store while the jobs run: are all visible checkpoints complete?
   ├─ checks.py   the facts that must hold at the end
   └─ report.py   progress bars, the table, result.json
"""
