"""A rank's way to the other ranks: MPI or torch.distributed, deadlines."""
