"""Restore: read the nearest good checkpoint into live tensors.

    list tiers, ring and store ─► choose a candidate ─► read its structure ─► does the state fit?
      ─► plan who reads what ─► read, check CRCs, exchange ─► load each object; after damage, the next candidate

restore, restore_attempt         start here: try the candidates in turn; read and load one candidate

inventory, choice                existing slices and manifests; the candidates made of them, newest or best first (pure)
ring_slices                      the stager's ring as a source
structure                        the tree of an image, with tensors allocated but not yet read
read_plan                        which rank reads which bytes, and which ranks need them

reading, slice_reader            reads units into tensors; reads slices, and tries other sources after damage
targets                          memory that bytes are read into: whole entries, or a rank's regions of tensors
exchange, broadcast, scatter     the exchange among ranks: bytes that all ranks need, and regions that some need
device_memory, device_sections   chooses the tensors to read into device memory; moves the bytes there

torch_loading, loading           which objects torch loads without custom code; loads the tree into the objects
split_parts                      this rank's parts of split tensors
narrowing                        reduces the tree to this rank's pipeline stage
joining_by_name, group_orders    matches optimizer parameters by name; reorders per-group lists of schedulers
mismatch, two_values             why a saved object does not fit; tied tensors with two values in the file
same_data                        whether the samplers of all ranks are for the same data
uncast                           keeps the dtypes and devices of optimizer state, which torch would cast
"""
