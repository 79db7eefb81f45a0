"""Local tiers (Lv.0): each rank keeps its own slice of the newest steps, beside the stager or without one.

tier_set     what a save needs: a Keeper, or NoTiers
keeper       ─► tier_room    room for slices of a layout; found_steps: what stays of what was found (pure)
             ─► step_slots   a slot in each tier ─► keeping (one step) ─► lane (the threads of a tier) ─► SliceWriter
             ─► outcomes     between lanes and council; tier_report: ledger, event log, warnings
council      what this rank says and asks of the others; council_thread: carries the messages
             coordinator     rank 0 decides (pure), with tally and chair
             council_member  what a rank does with it

slot files   slot_tier    the tier         file_slots  which slot next, which must stay (pure)
             slot_file    one file         slot_files  all of a rank        slot_writer     one slice on its way
             slot_format  its bytes        slot_scan   the slices found     tier_directory  where the files lie
             media, pm, libpmem            how bytes get into a file
the store    store_tier, store_shelf, store_writer                          as a tier, while there is no stager
at start     open_tiers, tier_profile      from settings and the device to tiers
             kept_slices                   what the tiers of all ranks hold
"""
