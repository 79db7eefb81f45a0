"""`holdfast status`: what stager, flusher, ring and store can tell of a run, put together while it goes on.

    stager ──┐ each is asked over a socket of its own (holdfast/telemetry/status_socket.py), and answers with
    flusher ─┤ bounded lists (status_document.py, beside it)
    ring ────┤ ring_files.py: journal and records, read as files, whether or not anybody lives
    store ───┴► run_watch.py ─► run_status.py: the state of the run ─► operator_side/commands/status_output.py,
                  │               ├ share_progress.py: of several     │ operator_side/live (`--web`)
                  │               │  stagers                          └ status_text.py: the words of both
                  │               └ loss.py: the loss if the run were killed now

docs/status.md says what each word means; reasons in docs/design/015-tools-read-evidence.md.
"""
