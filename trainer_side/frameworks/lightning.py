"""PyTorch Lightning: a callback that saves and restores, and the environment that knows the MPI job.

    Trainer(plugins=[HoldfastEnvironment()], callbacks=[HoldfastCallback(every=100)], strategy="ddp").fit(model, loader)

    on_fit_start         Checkpointer, restore(): before Lightning makes its loaders, and their iterators
    on_train_start       the random numbers again: beginning a loader has drawn some
    on_train_batch_start the first one: from here on it is an epoch as any other
    on_train_batch_end   step(), after the optimizer has stepped, where nothing else follows (below)
    on_train_end         what is still due; then close()

Lightning goes on behind the batch that was saved. What it would have done between that batch and the next one
(validation, an epoch's end) it does not do again. So nothing is saved there: the next batch that only a batch follows
is taken instead. docs/frameworks.md says what comes back exactly.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, StateError
from trainer_side.checkpointer import Checkpointer
from trainer_side.frameworks.missing import RngAgain, missing
from trainer_side.ranks.distributed import init_torch_distributed
from trainer_side.ranks.peers import gather
from trainer_side.state.per_rank import PerRank

try:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
except ImportError as error:
    raise missing("lightning", error) from error

__all__ = ["HoldfastCallback", "HoldfastEnvironment"]

_log = logging.getLogger("holdfast.trainer.lightning")


class HoldfastEnvironment(ClusterEnvironment):
    """The training ranks of this MPI job, for `Trainer(plugins=[HoldfastEnvironment()])`. Making it is collective.

    Lightning's own environment for MPI takes every process of the job for a rank, and would wait for the stager.

    Args:
        backend: `gloo` or `nccl`; None takes `nccl` if every rank can have a GPU of its own.

    Raises:
        PeerLost: A process of the job did not come.
    """

    def __init__(self, backend: Literal["gloo", "nccl"] | None = None) -> None:
        from trainer_side.ranks.mpi import World  # starts MPI: not when somebody only imports this module

        self._rank, self._ranks = init_torch_distributed(backend)
        world = World.join(TrainerConfig().start_seconds_max)
        hosts = gather(world.peers(), socket.gethostname().encode())
        self._local_rank, self._node = world.local_rank, list(dict.fromkeys(hosts)).index(hosts[self._rank])
        self._nodes = len(set(hosts))

    @staticmethod
    @override
    def detect() -> bool:
        """It is asked for by name."""
        return False

    @property
    @override
    def creates_processes_externally(self) -> bool:
        """It is mpirun that does."""
        return True

    @property
    @override
    def main_address(self) -> str:
        """`torch.distributed` is set up already."""
        raise StateError("lightning: torch.distributed of this MPI job was ended; make a new environment")

    @property
    @override
    def main_port(self) -> int:
        """As the address."""
        raise StateError("lightning: torch.distributed of this MPI job was ended; make a new environment")

    @override
    def world_size(self) -> int:
        """Number of training ranks."""
        return self._ranks

    @override
    def set_world_size(self, size: int) -> None:
        """It is what mpirun made it."""

    @override
    def global_rank(self) -> int:
        """This rank among the training ranks."""
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """It is what mpirun made it."""

    @override
    def local_rank(self) -> int:
        """This rank among those on its machine."""
        return self._local_rank

    @override
    def node_rank(self) -> int:
        """Number of its machine, in the order of ranks."""
        return self._node

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """See that Lightning counts as many ranks as mpirun has started.

        Raises:
            ConfigError: It does not.
        """
        if num_devices * num_nodes != self._ranks:
            raise ConfigError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) is {num_devices * num_nodes} ranks, mpirun has "
                f"started {self._ranks} training ranks on {self._nodes} machines; give `devices` the ranks of each "
                "machine, and `num_nodes` the machines"
            )


class HoldfastCallback(Checkpoint):
    """Saves while `Trainer.fit` trains, and brings the newest checkpoint back when it begins.

    Model, optimizers, schedulers, loops (steps, epochs, batches), loaders that have a state, the other callbacks,
    the data module, precision and each rank's random numbers are in the checkpoint. It takes the place of the
    `ModelCheckpoint` that Lightning adds by itself; for the best model, add one of your own.

    Args:
        every: Save after every so many steps of the optimizer (`trainer.global_step`); 0: only after a notice.
        state: More to save, by name, as `Checkpointer` takes it.
        config: Settings; by default `HOLDFAST_*` in the environment and `holdfast.toml`.

    Attributes:
        checkpointer: While `fit` runs.
    """

    def __init__(
        self, *, every: int = 0, state: Mapping[str, Any] | None = None, config: TrainerConfig | None = None
    ) -> None:
        self._every, self._more, self._config = every, dict(state or {}), config
        self.checkpointer: Checkpointer | None = None
        self._random = RngAgain()
        self._looked_at = -1

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the newest checkpoint back, if there is one."""
        if trainer.ckpt_path:
            raise ConfigError(
                f"Trainer.fit(ckpt_path={trainer.ckpt_path!r}) and HoldfastCallback both restore; give up one of them"
            )
        own = _state(trainer, pl_module, self)
        if twice := own.keys() & self._more.keys() | {"rng"} & self._more.keys():
            raise ConfigError(
                f"HoldfastCallback(state=…): {', '.join(sorted(twice))} is there already; rename it"
            )
        self.checkpointer = Checkpointer(
            {**own, **self._more, "rng": PerRank(self._random)}, config=self._config, every=self._every
        )
        self.checkpointer.restore()
        self._looked_at = trainer.global_step

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Random numbers go on as they were saved."""
        self._random.again()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Lightning has found its place."""
        # Else it would leave out the schedulers that watch a metric at the end of this epoch, for want of the metric.
        trainer.fit_loop._restarting = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save, if it is time."""
        if trainer.global_step == self._looked_at or self.checkpointer is None:
            return  # gradients are being accumulated: they are in no checkpoint
        if _something_follows(trainer):
            return
        self._step(trainer.global_step, self.checkpointer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what was put off at last, and wait until it is durable."""
        if self.checkpointer is not None and trainer.global_step > self._looked_at:
            self._step(trainer.global_step, self.checkpointer)
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Wait until what was saved is durable."""
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Where there was nothing left to train."""
        self._close()

    def _step(self, done: int, checkpointer: Checkpointer) -> None:
        """Of `done` steps those since the last look may have been due."""
        put_off = self._every > 0 and (done - 1) // self._every > self._looked_at // self._every
        self._looked_at = done
        if not checkpointer.step(done - 1) and put_off:
            checkpointer.save(done - 1)

    def _close(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None


def _something_follows(trainer: Trainer) -> bool:
    """Whether Lightning does something between this batch and the next that it would not do again."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None  # there was a batch
    return loop._num_ready_batches_reached() or loop._should_check_val_fx(fetcher)


def _state(trainer: Trainer, module: LightningModule, own: Callback) -> dict[str, Any]:
    """What a checkpoint holds, by name."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    parts: Any = trainer  # others set these two: the class does not name them
    others = [callback for callback in parts.callbacks if callback is not own]
    return {
        "model": module,
        **_named("optimizer", trainer.optimizers),
        **_named("scheduler", schedulers),
        "loops": trainer.fit_loop,
        "callbacks": _Callbacks(others),
        "metrics": PerRank(_Metrics(trainer)),
        "precision": trainer.precision_plugin,
        **({} if parts.datamodule is None else {"datamodule": parts.datamodule}),
    }


def _named(name: str, values: Sequence[Any]) -> dict[str, Any]:
    return {name: values[0]} if len(values) == 1 else {f"{name}{i}": value for i, value in enumerate(values)}


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
                "the checkpoint has the state of callbacks that this Trainer lacks: %s", ", ".join(left)
            )


class _Metrics:
    """What was logged last, by name, which callbacks and schedulers look at until it is logged anew."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return dict(self._trainer.callback_metrics)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        device = self._trainer.strategy.root_device
        self._trainer._logger_connector._callback_metrics.update(
            {name: value.to(device) for name, value in saved.items()}
        )
