"""`holdfast status`: combines what stager, flusher, ring and store report on a run while it is running.

    stager ──┐ each answers over its own socket (holdfast/telemetry/status_socket.py) with bounded lists
    flusher ─┤ (status_document.py, beside it)
    ring ────┤ ring_files.py: journal and records, read as files, even without a live owner
    store ───┴► run_watch.py ─► run_status.py: the state of the run ─► operator_side/commands/status_output.py,
                  │               ├ share_progress.py: progress of    │ operator_side/live (`--web`)
                  │               │  several stagers                  └ status_text.py: the wording of both
                  │               └ loss.py: the loss if the run were killed now

docs/status.md explains each word; reasons in docs/design/015-tools-read-evidence.md.
"""
