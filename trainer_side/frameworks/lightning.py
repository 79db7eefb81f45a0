"""PyTorch Lightning: a callback that saves and restores, and the environment of the job.

    Trainer(plugins=[HoldfastEnvironment()], callbacks=[HoldfastCallback(every=100)], strategy="ddp").fit(model, loader)

After a restore Lightning continues with the batch after the saved one. Lightning does not repeat work between two
batches (validation, the end of an epoch). The callback therefore delays a save before such work until a batch is
directly followed by another. docs/guides/lightning.md says what is restored exactly.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, StateError
from trainer_side.checkpointer import Checkpointer
from trainer_side.frameworks.missing import (
    ReloadableRngState,
    missing_framework,
    numbered,
    reject_taken_names,
)
from trainer_side.opaque import opaque_methods
from trainer_side.ranks.distributed import init_torch_distributed
from trainer_side.ranks.joined import join_world
from trainer_side.ranks.peers import gather
from trainer_side.state.per_rank import PerRank

try:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
    from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector
except ImportError as error:
    raise missing_framework("lightning", error) from error

__all__ = ["HoldfastCallback", "HoldfastEnvironment"]

_log = logging.getLogger("holdfast.trainer.lightning")


class HoldfastEnvironment(ClusterEnvironment):
    """Tells Lightning the training ranks of this job: `Trainer(plugins=[HoldfastEnvironment()])`.

    The constructor is collective. Lightning's own environment for MPI counts every process of the job as a rank, and
    would wait for the stager.

    Args:
        backend: `gloo` or `nccl`. None: `nccl` if every rank can have a GPU of its own, otherwise `gloo`.

    Raises:
        PeerLost: A process of the job did not connect within `start_seconds_max`.
    """

    def __init__(self, backend: Literal["gloo", "nccl"] | None = None) -> None:
        self._rank, self._ranks = init_torch_distributed(backend)
        world = join_world(TrainerConfig())
        hosts = gather(world.peers(), socket.gethostname().encode())
        self._local_rank, self._node = world.local_rank, list(dict.fromkeys(hosts)).index(hosts[self._rank])
        self._nodes = len(set(hosts))

    @staticmethod
    @override
    def detect() -> bool:
        """False: Lightning never chooses this environment by itself."""
        return False

    @property
    @override
    def creates_processes_externally(self) -> bool:
        """True: mpirun or torchrun starts the processes."""
        return True

    @property
    @override
    def main_address(self) -> str:
        """Not available: `torch.distributed` is set up already, so Lightning needs no address."""
        raise StateError("lightning: torch.distributed of this job was ended; make a new environment")

    @property
    @override
    def main_port(self) -> int:
        """Not available: `torch.distributed` is set up already, so Lightning needs no port."""
        raise StateError("lightning: torch.distributed of this job was ended; make a new environment")

    @override
    def world_size(self) -> int:
        """Number of training ranks."""
        return self._ranks

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has set the number of ranks."""

    @override
    def global_rank(self) -> int:
        """Number of this rank among the training ranks."""
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has set the rank."""

    @override
    def local_rank(self) -> int:
        """Number of this rank among the training ranks on its machine."""
        return self._local_rank

    @override
    def node_rank(self) -> int:
        """Number of this rank's machine, in the order of ranks."""
        return self._node

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check that Lightning counts as many ranks as the launcher has started.

        Raises:
            ConfigError: The two numbers differ.
        """
        if num_devices * num_nodes != self._ranks:
            raise ConfigError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) makes {num_devices * num_nodes} ranks, but "
                f"the job has {self._ranks} training ranks on {self._nodes} machines; set `devices` to the "
                "number of ranks on each machine, and `num_nodes` to the number of machines"
            )


@opaque_methods
class HoldfastCallback(Checkpoint):
    """Takes checkpoints while `Trainer.fit` trains, and restores the newest one when `fit` begins.

    A checkpoint has the model, optimizers, schedulers, loops (steps, epochs, batches), loaders that have a state, the
    other callbacks, the data module, precision and each rank's random state. The callback replaces the
    `ModelCheckpoint` that Lightning adds by itself; to keep the best model, add your own. Lightning's
    `enable_checkpointing=False` has no effect on this callback.

    Args:
        every: Number of optimizer steps (`trainer.global_step`) from one checkpoint to the next. 0: checkpoints only
            after a preemption notice.
        state: Further objects to save, by name, as `Checkpointer` takes them.
        config: Settings. None: from `HOLDFAST_*` in the environment and from `holdfast.toml`.

    Attributes:
        checkpointer: The Checkpointer while `fit` runs; None otherwise.
    """

    def __init__(
        self, *, every: int = 0, state: Mapping[str, Any] | None = None, config: TrainerConfig | None = None
    ) -> None:
        self._every, self._extra_state, self._config = every, dict(state or {}), config
        self.checkpointer: Checkpointer | None = None
        self._random = ReloadableRngState()
        self._last_checked = -1
        self._notice_handler: Any = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the newest checkpoint, if there is one, before Lightning makes its loaders and their iterators.

        Raises:
            ConfigError: The Trainer restores by itself, its strategy is FSDP1 or DeepSpeed, or the callback itself uses
                a name in `state`.
            DamageError, StateError, StoreError: As `Checkpointer.restore`.
        """
        if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
            raise ConfigError(
                f"lightning: {type(trainer.strategy).__name__} splits the model in a way that holdfast does not save; "
                "use ModelParallelStrategy with fully_shard (FSDP2) in configure_model, or strategy='ddp'"
            )
        if trainer.ckpt_path:
            raise ConfigError(
                f"Trainer.fit(ckpt_path={trainer.ckpt_path!r}) and HoldfastCallback both restore; leave one of them out"
            )
        own, rng = _state(trainer, pl_module, self), {"rng": PerRank(self._random)}
        reject_taken_names({**own, **rng}, self._extra_state)
        before = signal.getsignal(signal.SIGTERM)
        state = {**own, **self._extra_state, **rng}
        self.checkpointer = Checkpointer(state, config=self._config, every=self._every)
        handler = signal.getsignal(signal.SIGTERM)
        self._notice_handler = None if handler == before else handler
        self.checkpointer.restore()
        self._last_checked = trainer.global_step

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the random states to the saved ones, and treat SIGTERM as a notice again."""
        # Making a loader's iterator has drawn numbers.
        self._random.reload()
        if self._notice_handler is not None:
            # Lightning's handler is a collective of all ranks: a single rank with a notice would block in it.
            signal.signal(signal.SIGTERM, self._notice_handler)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Tell Lightning that it is no longer restarting."""
        # Otherwise Lightning, at the end of this epoch, skips schedulers that watch a metric.
        trainer.fit_loop._restarting = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a checkpoint is due."""
        if trainer.global_step == self._last_checked or self.checkpointer is None:
            return  # gradients are being accumulated, and checkpoints do not contain them
        if _has_work_after_batch(trainer):
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._step(trainer.global_step, self.checkpointer, batch=batch, loss=loss)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if its checkpoint was delayed, and wait until all checkpoints are durable."""
        if self.checkpointer is not None and trainer.global_step > self._last_checked:
            self._step(trainer.global_step, self.checkpointer)
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Wait until the checkpoints that were begun are durable."""
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the Checkpointer if `fit` had nothing left to train."""
        self._close()

    def _step(self, done: int, checkpointer: Checkpointer, *, batch: Any = None, loss: Any = None) -> None:
        """Report `done` steps to the Checkpointer, and save if a checkpoint was due since the last call."""
        was_delayed = self._every > 0 and (done - 1) // self._every > self._last_checked // self._every
        self._last_checked = done
        if not checkpointer.step(done - 1, batch=batch, loss=loss) and was_delayed:
            checkpointer.save(done - 1)

    def _close(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None


def _accept_disabled_checkpointing() -> None:
    """Make `Trainer(enable_checkpointing=False)` accept this callback.

    Lightning then refuses every `Checkpoint`. The callback must be a `Checkpoint`: otherwise Lightning adds its own
    ModelCheckpoint, and does not call the callback last.
    """
    configure: Any = _CallbackConnector._configure_checkpoint_callbacks

    def without_ours(connector: _CallbackConnector, enable_checkpointing: bool) -> None:
        found = connector.trainer.checkpoint_callbacks
        if enable_checkpointing or not all(isinstance(one, HoldfastCallback) for one in found):
            configure(connector, enable_checkpointing)

    _CallbackConnector._configure_checkpoint_callbacks = without_ours  # type: ignore[assignment,method-assign]


_accept_disabled_checkpointing()


def _has_work_after_batch(trainer: Trainer) -> bool:
    """Whether Lightning does work after this batch that it would not repeat after a restore."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None  # there was a batch
    return loop._num_ready_batches_reached() or loop._should_check_val_fx(fetcher)


def _state(trainer: Trainer, module: LightningModule, own: Callback) -> dict[str, Any]:
    # `callbacks` and `datamodule` are set from outside, so the class does not declare them.
    parts: Any = trainer
    others = [callback for callback in parts.callbacks if callback is not own]
    return {
        "model": module,
        **numbered("optimizer", trainer.optimizers),
        **numbered("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs]),
        "loops": trainer.fit_loop,
        "callbacks": _Callbacks(others),
        "metrics": PerRank(_Metrics(trainer)),
        "precision": _precision(trainer.precision_plugin),
        **({} if parts.datamodule is None else {"datamodule": parts.datamodule}),
    }


def _precision(plugin: Precision) -> Any:
    """Return the plugin, or the gradient scaler if that is its whole state: `save()` need not wait for a scaler."""
    if isinstance(plugin, MixedPrecision) and type(plugin).state_dict is MixedPrecision.state_dict:
        return plugin if plugin.scaler is None else plugin.scaler
    return plugin


class _Callbacks:
    """The other callbacks, as one object with a state."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        states = {callback.state_key: callback.state_dict() for callback in self._callbacks}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        left = dict(saved)
        for callback in self._callbacks:
            if (state := left.pop(callback.state_key, None)) is not None:
                callback.load_state_dict(state)
        if left:
            _log.warning(
                "the checkpoint has the state of callbacks that this Trainer does not have, and it is not restored: %s",
                ", ".join(left),
            )


class _Metrics:
    """The last logged metrics, by name: callbacks and schedulers read them until they are logged again."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return dict(self._trainer.callback_metrics)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        device = self._trainer.strategy.root_device
        self._trainer._logger_connector._callback_metrics.update(
            {name: value.to(device) for name, value in saved.items()}
        )
