"""Local tiers (Lv.0): where each rank keeps its own slice of the newest steps, beside or without the stager.

keeper ─► keeping (one step) ─► lane (a tier's threads) ─► SliceWriter of a tier (base)
   └────► council ── words ──► rank 0: tally ── complete, or void ──► every rank's tiers

slot files   slot_tier    the tier         slots       which slot next, which must stay (pure)
             slot_file    one file         slot_files  all of a rank       slot_writer  one slice on its way
             slot_format  its bytes        slot_scan   found ones          place        where they lie
             media, pm, libpmem            what lies beneath
the store    store, store_shelf, store_writer, store_parts                 as a tier, while there is no stager
at start     muster       whether every rank is ready (pure)
             opening, profile   from settings and the device to tiers      inventory    what all ranks' tiers hold
"""
