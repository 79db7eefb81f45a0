"""Peers side by side on one machine, in one run: every figure that the documentation quotes comes from here.

See README.md for the map and the method.
"""
