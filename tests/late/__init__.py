"""A CUDA device that is not there, under the CUDA build of torch: its work is done as late as it may be.

    torch's CUDA build ─► libcudart.so.13 of ours (machine.h) ─► streams are queues ─► done when somebody may wait
                       ─► ATen's ops ─► kernels.cpp ─► on the CPU, in the memory of the device

A copy that waits for too little gives wrong bytes each time, not once in a thousand runs. CONTRIBUTING.md says what
this shows and what only a device can. `python -m tests.late tests/gpu` runs tests on it.
"""
