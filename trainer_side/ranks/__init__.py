"""What a rank needs of the other ranks: MPI, torch.distributed, deadlines."""
