"""`make demo`: training ranks are killed without notice, and a fresh cluster goes on as if nothing had happened.

story.py ── plays it: reference run · run until killed · fresh cluster
   ├─ job.py      one launcher: start it, follow its progress, kill its training ranks, see what it leaves
   ├─ store.py    watches the store while the jobs run: what is visible there, and is it whole?
   ├─ checks.py   the facts that must hold at the end
   └─ report.py   progress bars, the table, result.json
"""
