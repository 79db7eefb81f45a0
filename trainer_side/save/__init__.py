"""Save: from `save()` to a filled staging area.

The training thread copies plain values and buffers; the copy thread copies the slice behind the gate while training
continues. Read saver, planner, copier and staging first, in this order.

saver                            one `save()`, from the call until training continues
finished_step                    the last step that the script has finished, and whether the state is still that step's
metric_values                    the metrics that a script gives to a save
rank_context                     the objects that every part of a save needs on this rank

planner, copy_plan               the plan that all ranks agree on; the order and the batches of a copy (pure)
layout_agreement                 all ranks compare their tensors before a plan is made
fresh_run_check, left_out        refuses to overwrite a run by accident; names trained tensors that the state lacks

staging_pool, staging            the staging areas of this rank; one area: this rank's bytes, frame by frame
host_memory, process_memory      locks the areas' memory for devices; reads words of many tensors by one call
copier                           the copy thread
device_copy, parcel              copies from a device into an area; packs small tensors into one transfer
device_stream, device_dedup      the calls to one device; skips device tensors that have not changed

gate, split_step                 holds back `optimizer.step()`, or splits it, while its tensors are being copied
optimizer_steps                  watches which optimizers step
hook_coverage                    decides whether a copy may outlast `save()`
tearing, fingerprint             detects torn copies; samples replicas, so that the stager can compare the ranks
"""
