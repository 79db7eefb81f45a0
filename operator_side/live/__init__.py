"""`holdfast status --web`: the status of a run as a page that keeps up with it, on this machine's loopback.

    status/run_watch.py ─► RunStatus ─┐
    run_log.py ─► report/facts.py ────┴─► live_page.py ─► live.html, of the parts in operator_side/page
                                              └► page_server.py: HTTP on 127.0.0.1, for who has the key

The browser asks for the page's main part again and again; the words and figures are made here, once for all tools.
"""
