from __future__ import annotations

import pytest

from operator_side.drill.compare import is_measured

LOG = "trainer/json/log_history/5/"


@pytest.mark.parametrize(
    "path",
    [
        *(LOG + name for name in ("eval_runtime", "eval_samples_per_second", "train_steps_per_second")),
        *(
            LOG + name
            for name in ("train_tokens_per_second", "eval_jit_compilation_time", "step_time_ms", "it/s")
        ),
        *(LOG + name for name in ("stepTime", "wall_clock", "timestamp", "elapsed", "mfu", "tokensPerSec")),
        "run/logs/3/date",
        "history/epoch_seconds/7/seconds",
        "metrics/throughput",
        "callbacks/Timer/time_elapsed/train",
    ],
)
def test_times_that_a_clock_measures_for_a_log_do_not_count(path: str) -> None:
    assert is_measured(path, [])


@pytest.mark.parametrize(
    "path",
    [
        *(
            LOG + name
            for name in ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos")
        ),
        *(
            LOG + name
            for name in ("train_loss", "num_input_tokens_seen", "time_steps", "timestep", "sometimes")
        ),
        "environment/time",  # which may be trained on
        "model/runtime",
        "catalog/time",
        "logits/seconds",
        "scheduler/last_epoch",
    ],
)
def test_unmeasured_values_count(path: str) -> None:
    assert not is_measured(path, [path])


def test_a_mean_since_the_restart_is_told_by_its_neighbour() -> None:
    assert is_measured(LOG + "train_loss", [LOG + "train_runtime"])
    assert is_measured(LOG + "loss", [LOG + "grad_norm"])
    assert not is_measured(LOG + "loss", [LOG + "train_runtime"])
    assert not is_measured(LOG + "train_loss", ["trainer/json/log_history/4/train_runtime"])
