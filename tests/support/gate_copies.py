"""Slow copies behind the gate, while a training loop runs: layer by layer, as the copy thread makes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer

from trainer_side.save.gate import Gate, storage_address
from trainer_side.state.split_tensor import local_of

COPY_SECONDS = 0.001  # for each storage; there are some twenty
SECONDS_MAX = 60.0


class Copies:
    """After each step, copies all tensors that the optimizers change, while training continues.

    Half-way through, the copy pauses until the next update has come, however fast training is.

    Args:
        gate: None: only the training.
        optimizers: The training's.
        turn: `(rank, ranks)`: this rank copies every `ranks`-th parameter with its moments; other ranks copy the rest.

    Attributes:
        waited_seconds: Time for which updates were held back.
    """

    def __init__(
        self, gate: Gate | None, optimizers: Sequence[Optimizer], turn: tuple[int, int] = (0, 1)
    ) -> None:
        self._gate, self._optimizers, self._turn = gate, optimizers, turn
        self._thread: threading.Thread | None = None
        self._wanted: list[dict[int, torch.Tensor]] = []
        self._got: list[dict[int, torch.Tensor]] = []
        self._no_more_updates = threading.Event()
        self.waited_seconds = 0.0

    def save(self) -> None:
        if self._gate is None:
            return
        self.join()
        live = {storage_address(tensor): local_of(tensor).detach() for tensor in self._tensors()}
        self._wanted.append({address: tensor.clone() for address, tensor in live.items()})
        self._got.append({})
        self._no_more_updates.clear()
        self._gate.close()
        self._thread = threading.Thread(target=self._copy, args=(self._gate, live, self._got[-1]))
        self._thread.start()

    def _copy(self, gate: Gate, live: dict[int, torch.Tensor], got: dict[int, torch.Tensor]) -> None:
        order = gate.update_order()
        gate.hold(live.keys())
        addresses = sorted(live, key=lambda address: order.get(address, len(order)))
        for number, address in enumerate(addresses):
            if number == len(addresses) // 2:
                self._await_update(gate, {address: live[address] for address in addresses[number:]})
            time.sleep(COPY_SECONDS)
            got[address] = live[address].clone()
            gate.release([address])
        self.waited_seconds += gate.open()

    def _await_update(self, gate: Gate, left: dict[int, torch.Tensor]) -> None:
        """Wait until the training waits at the gate, or has changed tensors still to copy, or no update comes."""
        wanted, deadline = self._wanted[-1], time.monotonic() + SECONDS_MAX
        while not (
            gate._waiting
            or self._no_more_updates.is_set()
            or any(not tensor.equal(wanted[address]) for address, tensor in left.items())
        ):
            assert time.monotonic() < deadline
            time.sleep(COPY_SECONDS)

    def _tensors(self) -> Iterator[torch.Tensor]:
        rank, ranks = self._turn
        groups = [(one, group["params"]) for one in self._optimizers for group in one.param_groups]
        all_parameters = [(optimizer, parameter) for optimizer, those in groups for parameter in those]
        for optimizer, parameter in all_parameters[rank::ranks]:
            yield parameter
            state = optimizer.state.get(parameter, {})
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def join(self) -> None:
        self._no_more_updates.set()
        if self._thread is not None:
            self._thread.join(SECONDS_MAX)
            assert not self._thread.is_alive()

    def torn(self) -> int:
        """Number of copies that differ from the tensors at `save()`."""
        self.join()
        return sum(
            any(not got[address].equal(tensor) for address, tensor in wanted.items())
            for wanted, got in zip(self._wanted, self._got, strict=True)
        )
