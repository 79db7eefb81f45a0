"""Export, import and diff: converts checkpoints to and from files of other tools, and compares two states.

    out   contents ─► safetensors_out, by way of plain_values
                   └► dcp_out
    in    import_source: a file of torch.save, or safetensors_in, or dcp_in

contents                              out: a checkpoint, read storage by storage with its CRC-32 checked; flat names
safetensors_out, dcp_out              out: the formats
state_comparison                      two states, compared tensor by tensor
import_source                         in: a file as a state, and that state as a checkpoint of one rank
safetensors_in, dcp_in                in: the formats
dcp_claims, dcp_parts                 in: the checked claims and stored parts of a DCP folder
plain_values                          values other than tensors, as JSON

The commands are operator_side/commands/export.py, import_state.py and diff.py.
The reasons: docs/design/015-tools-read-evidence.md.
"""
