"""`holdfast status --web`: the status of a run as a page that keeps up with it, on this machine's loopback.

    operator_side/status: RunStatus ────────────────┐
    run_log.py ─► operator_side/report: RunFacts ───┴─► live_page.py ─► live.html, of the parts in operator_side/page
                                                            └► page_server.py: HTTP on 127.0.0.1, for who has the key

The browser asks for the page's main part again and again; the words and figures are made here, once for all tools.
"""
