"""Calls to the runtime below torch, simulated by a library that keeps the last error as CUDA does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from trainer_side.save.device_stream import DeviceRuntime

OUT_OF_MEMORY = 2


class Library:
    """Answers each call with an error, or with none. Names of `missing` are not there."""

    def __init__(self, error: int = 0, missing: str = "") -> None:
        self._error, self._missing = error, missing
        self.last_error = 0
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self._missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name.endswith("GetLastError"):
                found, self.last_error = self.last_error, 0
                return found
            self.last_error = self._error
            if name.endswith("StreamCreateWithPriority") and not self._error:
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = 0xBEEF
            return self._error

        return call


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_each_call_has_the_name_of_the_runtime(prefix: str) -> None:
    library = Library()
    runtime = DeviceRuntime(library, prefix)
    assert runtime.lock(4096, 8192) == 0
    runtime.unlock(4096)
    runtime.relax_capture_mode()
    assert runtime.new_stream() == 0xBEEF
    assert all(name.startswith(prefix) for name in library.called)
    assert library.called[0] == f"{prefix}HostRegister"


def test_a_refused_registration_leaves_no_error_for_the_next_kernel() -> None:
    library = Library(OUT_OF_MEMORY)
    assert DeviceRuntime(library, "cuda").lock(4096, 8192) == OUT_OF_MEMORY
    assert library.last_error == 0


def test_a_runtime_that_refuses_a_stream_gives_none() -> None:
    library = Library(OUT_OF_MEMORY)
    assert DeviceRuntime(library, "cuda").new_stream() is None
    assert library.last_error == 0


def test_a_missing_runtime_call_is_refused() -> None:
    runtime = DeviceRuntime(Library(missing="hipHostRegister"), "hip")
    assert runtime.lock(4096, 8192) != 0
