"""The late runtime's rules of devices, their memory and their errors."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from pathlib import Path

import pytest
import torch

from holdfast.store.file_system import IN_MEMORY, file_system_of
from tests.late.control import ILLEGAL_ADDRESS, LateMachine
from trainer_side.save.device_stream import device_runtime

pytestmark = pytest.mark.late("lazy")
MIB = 1 << 20


def block(mib: int, device: int = 0) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device=f"cuda:{device}")


def runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.13")


def test_the_host_cannot_touch_the_memory_of_a_device() -> None:
    address = block(1).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[1].startswith("---"), line
            return
    raise AssertionError("not mapped at all")


def test_fresh_memory_holds_what_nobody_wrote() -> None:
    torch.cuda.empty_cache()
    assert set(block(1).cpu().tolist()) == {0xEE}
    assert set(torch.empty(4096, dtype=torch.uint8, pin_memory=True).tolist()) == {0xEE}


def test_each_device_has_memory_of_its_own(late: LateMachine) -> None:
    before = [late.device_bytes(device) for device in (0, 1)]
    kept = block(64, 1)
    assert [late.device_bytes(device) - had for device, had in zip((0, 1), before, strict=True)] == [
        0,
        64 * MIB,
    ]
    free, total = torch.cuda.mem_get_info(1)
    assert total - free == late.device_bytes(1)
    del kept
    torch.cuda.empty_cache()
    assert late.device_bytes(1) == before[1]


def test_a_full_device_refuses() -> None:
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        block(total // MIB + 1)


def of_the_pool(stream: torch.cuda.Stream, nbytes: int = MIB) -> ctypes.c_void_p:
    address = ctypes.c_void_p()
    handle = ctypes.c_void_p(stream.cuda_stream)
    assert runtime().cudaMallocAsync(ctypes.byref(address), ctypes.c_size_t(nbytes), handle) == 0
    return address


@pytest.mark.late("lazy", "eager")
def test_memory_of_a_pool_goes_back_when_its_stream_has_come_there_and_somebody_waits(
    late: LateMachine, late_policy: str
) -> None:
    side, before = torch.cuda.Stream(1), late.device_bytes(1)  # type: ignore[no-untyped-call]
    handle = ctypes.c_void_p(side.cuda_stream)
    waits = late.host_waits()
    address = of_the_pool(side)
    assert late.host_waits() == waits + 1, "memory that must be mapped waits for what is queued"
    with late.no_host_waits():
        assert runtime().cudaFreeAsync(address, handle) == 0
    assert late.device_bytes(1) - before == MIB, "the pool has it, also when the stream has come there"
    free, total = torch.cuda.mem_get_info(1)
    assert total - free == late.device_bytes(1)
    waits = late.host_waits()
    again = of_the_pool(side)
    assert late.host_waits() == waits + (0 if late_policy == "eager" else 1), (
        "only what the pool has is there at once"
    )
    assert late.device_bytes(1) - before == (1 if late_policy == "eager" else 2) * MIB
    assert runtime().cudaFreeAsync(again, handle) == 0
    event = side.record_event()
    event.synchronize()
    assert late.device_bytes(1) == before
    assert runtime().cudaFreeAsync(address, handle) != 0
    assert runtime().cudaMallocAsync(ctypes.byref(address), ctypes.c_size_t(1 << 40), handle) != 0
    assert runtime().cudaGetLastError() != 0


@pytest.mark.late("side_lazy")
@pytest.mark.parametrize("waits", [False, True])
def test_memory_of_a_pool_is_there_from_a_point_of_its_stream_on(waits: bool) -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    address = of_the_pool(side, 4096)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    assert runtime().cudaMemsetAsync(address, 7, ctypes.c_size_t(4096), ctypes.c_void_p()) == 0
    host = torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    arguments = ctypes.c_void_p(host.data_ptr()), address, ctypes.c_size_t(4096), 2
    torch.cuda.synchronize()
    assert runtime().cudaMemcpyAsync(*arguments, ctypes.c_void_p(side.cuda_stream)) == 0
    assert runtime().cudaFreeAsync(address, ctypes.c_void_p(side.cuda_stream)) == 0
    side.synchronize()
    assert set(host.tolist()) == ({7} if waits else {0xEE})


def test_freed_device_memory_is_one_piece_again() -> None:
    free, _ = torch.cuda.mem_get_info()
    pieces = [block(64) for _ in range(8)]
    for piece in (0, 2, 1, 5, 4, 3, 7, 6):
        pieces[piece] = torch.empty(0)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free
    block(free // MIB - 8)


def test_an_op_runs_on_the_device_of_its_tensors() -> None:
    there = torch.zeros(4, device="cuda:1")
    there.add_(1)
    torch.cuda.synchronize(0)
    assert not torch.cuda.default_stream(1).query()
    assert torch.cuda.default_stream(0).query()


@pytest.mark.parametrize("wanted", [True, False])
def test_a_gradient_that_nobody_wants_is_none(wanted: bool) -> None:
    """The first layer's input needs no gradient."""
    there, here = (torch.nn.BatchNorm1d(3).to(device) for device in ("cuda", "cpu"))
    numbers = torch.arange(12.0).view(4, 3) ** 2
    ends = []
    for layer, device in ((there, "cuda"), (here, "cpu")):
        inputs = numbers.to(device).requires_grad_(wanted)
        (layer(inputs) ** 3).sum().backward()
        ends.append([layer.weight.grad, layer.bias.grad, inputs.grad])
    for on_device, on_host in zip(*ends, strict=True):
        assert (on_device is None) is (on_host is None)
        if on_device is not None and on_host is not None:
            assert torch.equal(on_device.cpu(), on_host)


def test_an_op_refuses_tensors_of_two_devices() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([torch.zeros(4, device="cuda:0"), torch.zeros(4, device="cuda:1")])


def test_a_kernel_refuses_a_stream_of_another_device() -> None:
    there = torch.cuda.Stream(1)  # type: ignore[no-untyped-call]
    assert (
        runtime().late_launch(ctypes.c_void_p(there.cuda_stream), b"a kernel", NOTHING, NOTHING, None) == 400
    )
    assert runtime().cudaGetLastError() == 400


NOTHING = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)


def test_an_event_belongs_to_one_device_and_can_be_waited_for_from_another() -> None:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.default_stream(1))
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)device|resource handle"):
        event.record(torch.cuda.default_stream(0))
    live = torch.zeros(4, device="cuda:1")
    live.fill_(3)
    changed = torch.cuda.default_stream(1).record_event()
    torch.cuda.default_stream(0).wait_event(changed)
    torch.cuda.synchronize(0)
    assert torch.cuda.default_stream(1).query()


def test_generators_are_of_a_device_each() -> None:
    torch.cuda.manual_seed_all(5)
    states = [torch.cuda.get_rng_state(device) for device in (0, 1)]
    first = torch.randn(4, device="cuda:0")
    assert not torch.cuda.get_rng_state(0).equal(states[0]), (
        "numbers that were drawn are to move the generator"
    )
    assert torch.cuda.get_rng_state(1).equal(states[1])
    assert torch.equal(torch.randn(4, device="cuda:1").cpu(), first.cpu())
    before = torch.get_rng_state()
    torch.nn.functional.dropout(torch.randn(100, device="cuda"))
    torch.cuda.synchronize()
    assert torch.get_rng_state().equal(before), "the host's own generator was drawn from"


# -- faults ---------------------------------------------------------------------------------------------------------


def test_an_allocation_is_refused_where_a_test_wants_it(late: LateMachine) -> None:
    torch.cuda.empty_cache()
    late.fail("cudaMalloc", after=1, times=2)  # torch frees its cache, and tries once more
    kept = block(64)
    with pytest.raises(torch.OutOfMemoryError):
        block(64)
    again = block(64)
    assert kept.data_ptr() != again.data_ptr()


def test_a_refused_registration_leaves_its_error_to_the_next_kernel(late: LateMachine) -> None:
    live = torch.zeros(4, device="cuda")
    host = torch.zeros(4096, dtype=torch.uint8)
    late.fail("cudaHostRegister")
    assert runtime().cudaHostRegister(ctypes.c_void_p(host.data_ptr()), ctypes.c_size_t(4096), 0) == 2
    with pytest.raises(RuntimeError, match="out of memory"):
        live.add_(1)
    live.add_(1)
    assert live[0].item() == 2


def test_a_device_error_stays(late: LateMachine) -> None:
    live = torch.zeros(4, device="cuda")
    late.fail("cudaMemcpyAsync", after=1, error=ILLEGAL_ADDRESS, lasting=True)
    live.cpu()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            live.cpu()
    late.heal()
    assert live.cpu().tolist() == [0, 0, 0, 0]


def test_any_call_can_be_the_one_that_fails(late: LateMachine) -> None:
    live = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    late.fail("any", after=2, error=ILLEGAL_ADDRESS)
    live.add_(1)
    live.add_(1)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        live.add_(1)


# -- pinned memory --------------------------------------------------------------------------------------------------


def test_memory_is_registered_once(late: LateMachine) -> None:
    host = torch.zeros(3 * 4096, dtype=torch.uint8)
    address = ctypes.c_void_p(host.data_ptr())
    before = late.pinned_bytes()
    assert runtime().cudaHostRegister(address, ctypes.c_size_t(8192), 0) == 0
    assert late.pinned_bytes() == before + 8192
    assert host.is_pinned()
    inside = ctypes.c_void_p(host.data_ptr() + 4096)
    assert runtime().cudaHostRegister(inside, ctypes.c_size_t(8192), 0) == 712
    assert runtime().cudaHostUnregister(address) == 0
    assert late.pinned_bytes() == before
    assert runtime().cudaHostUnregister(address) == 713
    runtime().cudaGetLastError()


def test_a_mapped_file_on_a_disk_cannot_be_registered(tmp_path: Path, tmpfs: Path, late: LateMachine) -> None:
    """A shared mapping: changes to a private one stay in the process."""
    if file_system_of(tmp_path) in IN_MEMORY:
        pytest.skip(f"{tmp_path} is in memory here")
    before = late.pinned_bytes()
    for folder, flags, refused in (
        (tmp_path, mmap.MAP_SHARED, 1),
        (tmp_path, mmap.MAP_PRIVATE, 0),
        (tmpfs, mmap.MAP_SHARED, 0),
    ):
        (folder / "a file").write_bytes(bytes(2 * 4096))
        with (folder / "a file").open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 2 * 4096, flags=flags)
        address = ctypes.c_void_p(torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() + 4096)
        assert runtime().cudaHostRegister(address, ctypes.c_size_t(4096), 0) == refused
        assert late.pinned_bytes() == before + (0 if refused else 4096)
        if not refused:
            assert runtime().cudaHostUnregister(address) == 0
    runtime().cudaGetLastError()


@pytest.mark.parametrize("early", [True, False])
def test_memory_that_queued_work_writes_is_not_unregistered(early: bool, late: LateMachine) -> None:
    live, host = torch.zeros(4096, dtype=torch.uint8, device="cuda"), torch.ones(4096, dtype=torch.uint8)
    address = ctypes.c_void_p(host.data_ptr())
    runtime().cudaHostRegister(address, ctypes.c_size_t(4096), 0)
    host.copy_(live, non_blocking=True)
    if not early:
        torch.cuda.synchronize()
    runtime().cudaHostUnregister(address)
    assert len(late.violations()) == early
    torch.cuda.synchronize()  # while the memory is still there


def test_memory_that_cuda_gave_is_taken_back(late: LateMachine) -> None:
    before = late.pinned_bytes()
    host = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    assert late.pinned_bytes() >= before
    del host
    torch._C._host_emptyCache()
    assert late.pinned_bytes() <= before


def test_the_runtime_that_is_called_is_torchs_and_not_another_one_in_the_process(tmp_path: Path) -> None:
    """Another runtime in the process, such as that of torch's wheels or of another package, may have no device."""
    source, other = tmp_path / "other.c", tmp_path / "libcudart.so.11"
    source.write_text(
        "int cudaGetLastError(void) { return 35; }\nint cudaHostRegister(void) { return 35; }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(other)], check=True)
    mapped = ctypes.CDLL(str(other))
    assert mapped.cudaHostRegister() == 35
    memory = torch.empty(MIB, dtype=torch.uint8)
    device_runtime.cache_clear()
    called = device_runtime()
    assert called is not None
    assert called.lock(memory.data_ptr(), MIB) == 0
    called.unlock(memory.data_ptr())
