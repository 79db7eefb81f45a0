"""Checkpoints in the store: names, manifests, the lease.

    publish   intent ─► file ─► manifest: only now the checkpoint exists ─► the intent is removed

catalog, manifest_order      the checkpoints of a run, newest first; the manifests and old slices of a listing
best_finder                  the best checkpoint of a run by a metric
branches                     branches after `holdfast rewind`, and the line on which training continues
publish, intents             names and manifests of checkpoints; a record of each object before it is made or removed
lease, identity              one writer per run; the process that holds the lease, so that others can see if it is alive
image_publishing             publishes an image that a tool has at hand
share_records                records by which the flushers of one file coordinate

verification, chunk_sums     reads a checkpoint back; the sums of one chunk
nonfinite                    counts NaN and infinite values
zip_directory                the central directory of the zip file, as torch writes it
"""
