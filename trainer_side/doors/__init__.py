"""Export and import: checkpoints become files that other tools read, and files of other tools become checkpoints.

out   contents   a checkpoint of a run, read storage by storage, each byte under its CRC-32
        ├► safetensors_out, by way of tensor_names and plain_values
        └► dcp_out
in    foreign    a file of torch.save, or safetensors_in, or dcp_in, as a state
        └► publishing   that state as the image of a checkpoint of one rank

safetensors_format   what reader and writer share

The commands are operator_side/commands/export.py and import_state.py.
The reasons: docs/design/015-tools-read-evidence.md.
"""
