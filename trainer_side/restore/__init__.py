"""Restore: from the nearest good checkpoint into live tensors.

    list tiers, ring and store ─► choose a candidate ─► read its structure ─► does the state fit?
      ─► plan who reads what ─► read, check CRCs, exchange ─► load each object; after damage, the next candidate

restore, restore_attempt         start here: all candidates in turn; one candidate, from its first byte to live objects

inventory, choice                slices and manifests that exist; the candidates, newest or best first (pure)
ring_slices                      the stager's ring as a source
structure                        the tree of an image, with tensors that are allocated and not yet read
read_plan                        which rank reads which bytes, and which ranks take them

reading, slice_reader            reads units into tensors; reads slices, and turns to another source after damage
targets                          the memory that bytes are read into: of whole entries, and of a rank's regions
exchange, broadcast, scatter     the exchange among ranks: bytes that all ranks take, and regions that some need
device_memory, device_sections   which tensors are read into a device; moves the bytes there

torch_loading, loading           which objects torch loads by itself; loads tree and `PerRank` values into the objects
split_parts                      this rank's parts of split tensors
narrowing                        reduces the tree to this rank's pipeline stage
joining_by_name, group_orders    matches optimizer parameters by name; puts schedulers' lists into the order of groups
mismatch, two_values             why a saved object does not fit; tied tensors that have two values in the file
uncast                           keeps the dtypes and devices of optimizer state, which torch would cast
"""
