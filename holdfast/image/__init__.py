"""The place of every byte of a checkpoint.

layout, layout_fields, index    each byte's place and its sender; the fields on the wire and on disk; lookups per chunk
entries, chunks, chunk_size     the entries of the image; work on one chunk; the size of chunks
regions, split_record           the parts of a split tensor; how it was split, for the manifest
replicas                        whether replicas are the same on all ranks
slices                          one rank's slice, as a tier keeps it
manifest                        the commit record of a checkpoint
"""
