"""The tools of the `holdfast` command, one file each. They read a store, and need neither torch nor MPI."""
