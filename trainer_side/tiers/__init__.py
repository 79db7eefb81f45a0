"""Local tiers (Lv.0): each rank keeps its own slice of the newest steps, beside the stager or without one.

tier_set     what a save needs: TierSet, also of a rank without tiers
local_tiers  the tiers at work ─► tier_write (one step) ─► tier_writer_threads (of one tier; a device that hangs)
commit_votes a rank's votes, and their thread ─► rank0_votes: rank 0 decides (pure) ─► rank0_preemption

slot files   slot_tier    the tier         file_slots  which slot next, which must stay (pure)
             slot_file    one file         slot_files  all of a rank        slot_writer     one slice on its way
             slot_format  its bytes        tier_directory  where the files lie; the lock of a rank
             medium, first_touch           how bytes get into a file
the store    store_tier, store_writer      as a tier, while there is no stager
at start     open_tiers, tier_inventory    from settings to tiers; the steps that the tiers of all ranks hold
"""
