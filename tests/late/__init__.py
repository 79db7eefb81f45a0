"""A simulated CUDA device, the late device, under the CUDA build of torch: it does work as late as CUDA allows.

    torch's CUDA build ─► our libcudart.so.13 (machine.h) ─► streams are queues ─► run when a thread may wait for them
                       ─► ATen's ops ─► kernels.cpp ─► on the CPU, in the memory of the device

A copy with a missing wait gives wrong bytes each time, not once in a thousand runs. CONTRIBUTING.md says which rules
this device can check and which need a real one. `python -m tests.late tests/gpu` runs tests on it.
"""
