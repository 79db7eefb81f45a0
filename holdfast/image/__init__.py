"""The place of every byte of a checkpoint.

layout, index                   each byte's place and its sender, checked and as bytes; lookups per chunk
shares, share_sums              the part of an image that one of several stagers receives; its CRCs
entries, chunks                 runs of bytes, entries and tensors of the image; work on one chunk
regions, split_record           the parts of a split tensor; how it was split, for the manifest
replicas                        whether replicas are the same on all ranks
slices                          one rank's slice, as a tier keeps it
checkpoint_id, save_record      the name of a checkpoint; times and bytes of one save
manifest, proof_record          the commit record of a checkpoint; what the step after it used
best_rule                       which checkpoint is the best by a metric
"""
