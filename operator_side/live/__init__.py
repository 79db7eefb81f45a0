"""`holdfast status --web`: the status of a run as a page that updates itself, on this machine's loopback.

The browser fetches the page's main part repeatedly. Python makes all words and figures, as for the other tools.
"""
