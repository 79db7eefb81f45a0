"""Local tiers (Lv.0): each rank keeps its own slice of the newest steps, with a stager or without one.

    begin: a slot in each tier ─► writer threads: frames as they get ready ─► seal
      ─► vote ─► rank 0 counts the votes of all ranks ─► COMPLETE or VOID, for each tier separately

tier_set, tier           the interface for a save, also of a rank without tiers; the interface of one tier
local_tiers              the tiers of this rank at work
tier_write               one step in flight to the tiers
tier_writer_threads      the threads of one tier; detects a device that hangs
commit_votes             a rank's votes, and the thread that sends them
rank0_votes              rank 0 counts votes and decides (pure)
rank0_preemption         rank 0 coordinates the save after a preemption notice, without a stager

slot_tier, slot_writer   a tier of slot files; one slice in flight to a slot
slot_files, slot_file    all slot files of a rank; one file, and which of its slots are sealed
slot_pages               pages of a slot file in memory, made beside training
slot_format              the bytes of a slot file
slot_proof               the file that proves a resume from one slot
file_slots               chooses the next slot, and the slices to keep (pure)
medium, first_touch      how bytes get into a slot file; first touch of its pages by several threads
tier_directory           where slot files lie, and the lock of a rank; checks of a tmpfs

open_tiers               from the setting `tiers` to tiers
tier_inventory           the steps that the tiers of all ranks hold at the start
"""
