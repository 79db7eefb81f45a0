"""`holdfast status`: combines what stager, flusher, ring and store report on a run while it is running.

    stager, flusher, ring, store ─► run_watch.py ─► run_status.py ─► status_output.py, live_page.py

docs/status.md explains each word; reasons in docs/design/015-tools-read-evidence.md.
"""
