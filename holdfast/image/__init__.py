"""The place of every byte of a checkpoint.

layout, index                   the place and the sender of each byte, validated and serialised; lookups per chunk
shares, share_sums              the part of an image that one of several stagers receives; its CRCs
entries, chunks                 runs of bytes, entries and tensors of the image; work on one chunk
regions, split_record           the parts of a split tensor; how it was split, for the manifest
replicas                        compares the replicas of all ranks
slices                          one rank's slice, as a tier keeps it
checkpoint_id, save_record      the name of a checkpoint; times and bytes of one save
manifest, proof_record          the commit record of a checkpoint; the data that the next step used
best_rule                       which checkpoint is the best by a metric
"""
