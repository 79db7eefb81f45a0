"""Local tiers (Lv.0): where each rank keeps its own slice of the newest steps, beside or without the stager."""
