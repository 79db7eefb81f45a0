"""A rank's way to the other ranks: MPI, torch.distributed, deadlines."""
