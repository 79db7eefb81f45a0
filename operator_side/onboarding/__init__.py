"""`holdfast init`: the lines that a training script needs, and the line that starts it. Nothing is written.

script ─► training_loop: what the script has (ast) ─► script_edits: the lines to change ─► a diff
launcher ─► start_lines: how stager and ranks are started
"""
