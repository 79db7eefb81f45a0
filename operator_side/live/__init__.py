"""`holdfast status --web`: the status of a run as a page that updates itself, on this machine's loopback.

    operator_side/status: RunStatus ────────────────┐
    run_log.py ─► operator_side/report: RunFacts ───┴─► live_page.py ─► live.html, with the parts in operator_side/page
                                                            └► page_server.py: HTTP on 127.0.0.1, protected by a key

The browser fetches the page's main part repeatedly. Python makes all words and figures, as for the other tools.
"""
