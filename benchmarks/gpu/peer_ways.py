"""holdfast's peers on a device: lm-resiliency, torch_checkpointing, DCP's async_save, torch.save.

Only the copy to host memory is compared: DCP's and torch_checkpointing's uploads from there are discarded. Ways whose
copy must not see an update wait in a hook before `optimizer.step()`, so the copy overlaps with forward and backward.
Some figures need private attributes of a peer, in the versions of packages.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device_training import DeviceTraining, Way, join_alone, tensors_of

__all__ = ["PEERS"]

_DONE_SECONDS_MAX = 120.0


class _Peer(Way):
    def __init__(self, training: DeviceTraining, folder: Path) -> None:
        join_alone()
        self.training, self.folder = training, folder

    def state(self) -> dict[str, Any]:
        """Return the state in the form of torch's own tools."""
        return {"model": self.training.model.state_dict(), "optimizer": self.training.optimizer.state_dict()}


class _LmResiliency(_Peer):
    """GEMINI's manager, called as by its adapters: live tensors and random state, two slots, nothing on disk.

    The adapters call `save_tensors` from a hook after `optimizer.step()`. `dp_replicate=2` tells it that replicas
    exist, so it makes no slots for a peer.
    """

    keeps = (
        "a stream of its own waits for the training's stream and then reads live tensors; nothing makes the next "
        "optimizer.step() wait for it"
    )
    warm_ups = 2

    def __init__(self, training: DeviceTraining, folder: Path) -> None:
        from lm_resiliency.adapters import ParallelismInfo  # type: ignore[import-not-found,unused-ignore]
        from lm_resiliency.checkpointing import (  # type: ignore[import-not-found,unused-ignore]
            InMemoryCheckpointManager,
            InMemoryCkptConfig,
        )
        from lm_resiliency.checkpointing.buffer import (  # type: ignore[import-not-found,unused-ignore]
            SlotState,
        )
        from lm_resiliency.checkpointing.rng import (  # type: ignore[import-not-found,unused-ignore]
            RNG_KEY,
            capture_rng_state,
        )

        super().__init__(training, folder)
        self._ready, self._key, self._random = SlotState.READY, RNG_KEY, capture_rng_state
        config = InMemoryCkptConfig(
            disk_flush_interval=0, disk_folder=str(folder / "lmr"), run_id="peers", pin_memory=True
        )
        self._manager: Any = InMemoryCheckpointManager(
            config=config, parallelism_info=ParallelismInfo(dp_replicate=2)
        )

    def save(self, step: int) -> bool:
        self._manager.save_tensors(tensors_of(self.training), step + 1, extra={self._key: self._random()})
        return True

    def copied(self) -> bool:
        return bool(self._manager._buffer_pool.own_current.state is self._ready)

    def wait_done(self) -> None:
        self._manager.maybe_wait()

    def host_bytes(self) -> int:
        return int(self._manager._buffer_pool.total_memory_bytes())

    def found(self, paths: Sequence[tuple[Any, ...]], step: int) -> tuple[list[torch.Tensor], float]:
        slot = self._manager._buffer_pool.own_current
        assert (slot.step, len(slot.tensors)) == (step + 1, len(paths)), slot.step
        return list(slot.tensors), 0.0

    def close(self) -> None:
        self._manager.close()


def _discard(*_: object) -> None:
    """Discard the staged checkpoint, in torch_checkpointing's process."""
    from torch_checkpointing import checkpoint_writer  # type: ignore[import-not-found,unused-ignore]

    checkpoint_writer.CheckpointWriter._write_keys = lambda *_args, **_more: None


class _TorchCheckpointing(_Peer):
    """CheckpointManager with its defaults: shared pinned memory, a thread with its own stream, a writer process."""

    keeps = (
        "a thread copies live tensors on a stream that waits for an event of the training's stream; `with "
        "manager.lock(): optimizer.step()` makes the host wait until that is done"
    )
    warm_ups = 1

    def __init__(self, training: DeviceTraining, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager  # type: ignore[import-not-found,unused-ignore]

        super().__init__(training, folder)
        config: Any = CheckpointManager.Config(subprocess_init_fn=_discard)
        # Its limit of 30 s is too short for importing torch on a busy machine; the phase has its own limit.
        config.save.process_config.subprocess_init_timeout_secs = int(_DONE_SECONDS_MAX)
        self._manager: Any = CheckpointManager(config)
        self._manager._saver._checkpoint_process.wait_for_init()
        self._lock = self._manager.lock()
        self._written: Any = None

    def save(self, step: int) -> bool:
        self._written = self._manager.save(str(self.folder / f"tc-{step}"), self.state())
        return True

    def before_update(self) -> None:
        self._lock.acquire_or_raise()

    def after_update(self) -> None:
        self._lock.release()

    def copied(self) -> bool:
        return bool(self._manager._staging_future.done())

    def wait_done(self) -> None:
        if self._written is not None:
            self._written.result(_DONE_SECONDS_MAX)

    def host_bytes(self) -> int:
        return int(self._manager._saver.stager.pinned_num_bytes())

    def found(self, paths: Sequence[tuple[Any, ...]], step: int) -> tuple[list[torch.Tensor], float]:  # noqa: ARG002
        return _in(self._manager._saver.stager.get_staged_state_dict(), paths), 0.0

    def close(self) -> None:
        self._manager.close()


class _Discarding:
    """A DCP StorageWriter that writes nothing."""

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing."""

    def storage_meta(self) -> None:
        """No metadata."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **more: object) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: object) -> object:
        return plan

    def prepare_global_plan(self, plans: object) -> object:
        return plans

    def write_data(self, plan: object, planner: object) -> Any:  # noqa: ARG002
        done: Any = torch.futures.Future()  # type: ignore[no-untyped-call,unused-ignore]
        done.set_result([])
        return done

    def finish(self, metadata: object, results: object) -> None:
        """Do nothing."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:  # noqa: ARG003
        return True


def _kept_stager() -> Any:
    """Return torch's DefaultStager, changed to keep its memory between saves.

    Up to torch 2.12 it closes its inner stager after each save, with the pinned memory and the table for copying dicts,
    so the second save ends with a KeyError. The change makes it behave as in torch 2.13.
    """
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    class Kept(DefaultStager):
        last: Any = None

        def _stage(self, state_dict: Any, **_: Any) -> Any:
            stream: Any = self._staging_stream
            with stream:
                self.last = self._state_dict_stager.stage(state_dict, non_blocking=True)
            stream.synchronize()
            return self.last

    return Kept(
        StagingOptions(
            use_pinned_memory=True,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=True,
        )
    )


class _Dcp(_Peer):
    """`async_save` with its fastest options: pinned memory kept between saves, staging in a thread."""

    keeps = (
        "a thread copies live tensors on a stream that waits for nothing, so the training's stream is synchronized "
        "before async_save; the host waits for staging_completion before optimizer.step()"
    )
    warm_ups = 2

    def __init__(self, training: DeviceTraining, folder: Path) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        super().__init__(training, folder)
        self._stager = _kept_stager()
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None
        # DCP caches plans by the planner's class name, so each model needs a class of its own.
        self._planner: Any = type(f"PlannerOf{training.state_bytes}", (DefaultSavePlanner,), {})

    def save(self, step: int) -> bool:  # noqa: ARG002
        from torch.distributed.checkpoint.state_dict_saver import (
            AsyncCheckpointerType,
            AsyncSaveResponse,
            async_save,
        )

        torch.cuda.current_stream().synchronize()
        writer: Any = _Discarding()
        response = async_save(
            self.state(),
            storage_writer=writer,
            planner=self._planner(enable_plan_caching=True),
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
        )
        assert isinstance(response, AsyncSaveResponse)
        self._staged, self._written = response.staging_completion, response.upload_completion
        return True

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result(_DONE_SECONDS_MAX)

    def copied(self) -> bool:
        return self._staged is None or self._staged.done()

    def wait_done(self) -> None:
        if self._written is not None:
            self._written.result(_DONE_SECONDS_MAX)

    def host_bytes(self) -> int:
        storages = self._stager._state_dict_stager._cached_storage_mapping
        return sum(storage.nbytes() for storage in storages.values())

    def found(self, paths: Sequence[tuple[Any, ...]], step: int) -> tuple[list[torch.Tensor], float]:  # noqa: ARG002
        return _in(self._stager.last, paths), 0.0

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.before_update()
            self.wait_done()
        self._stager.close()


class _TorchSave(_Peer):
    keeps = "save() returns when the file is written"
    warm_ups = 0
    blocks = True

    @property
    def _file(self) -> Path:
        return self.folder / "plain.pt"

    def save(self, step: int) -> bool:  # noqa: ARG002
        torch.save(self.state(), self._file)
        return True

    def found(self, paths: Sequence[tuple[Any, ...]], step: int) -> tuple[list[torch.Tensor], float]:  # noqa: ARG002
        return _in(torch.load(self._file, map_location="cpu", mmap=True, weights_only=True), paths), 0.0

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


def _in(state: Any, paths: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    found = []
    for path in paths:
        here = state
        for key in path:
            here = here[key]
        found.append(here)
    return found


PEERS: dict[str, type[_Peer]] = {
    "lm_resiliency": _LmResiliency,
    "dcp": _Dcp,
    "torch_checkpointing": _TorchCheckpointing,
    "torch_save": _TorchSave,
}
