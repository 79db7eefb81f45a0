"""Doors in and out: checkpoints become files that others read, and files of others become checkpoints.

out   contents   a checkpoint of a run, read storage by storage, each byte under its CRC-32
        ├► safetensors_out, by way of names and plain_values
        └► dcp_out
in    foreign    a file of torch.save, or safetensors_in, or dcp_in, as a state
        └► publishing   that state as the image of a checkpoint of one rank

The commands are operator_side/commands/export.py and its neighbours. Why it is so: docs/design/024-doors.md.
"""
