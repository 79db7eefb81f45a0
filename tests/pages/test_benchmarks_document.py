"""Pictures, tables and verdicts are arithmetic over the JSON: the same input gives the same bytes."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import document, drawing, results, targets
from benchmarks.experiments import EXPERIMENTS, experiment
from benchmarks.experiments.makespan import interval_under, overheads
from benchmarks.switching_rank import WAYS as SWITCHED

pytest.importorskip("matplotlib")

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_MACHINE = {
    "cores": 2,
    "processor": "a processor",
    "memory_bytes": 8 << 30,
    "file_system": "ext4",
    "kernel": "6",
    "python": "3.11",
    "versions": {"torch": "2.13", "openmpi": "5"},
}


def _run(peer: str, every: int, seconds: float, *, number: int = 0, saves: int = 2) -> dict[str, Any]:
    return {
        "peer": peer,
        "every": every,
        "round": number,
        "iterations": every * saves,
        "makespan_seconds": seconds,
        "durable_seconds": seconds,
        "cpu_seconds": 1.0,
        "saves": 0 if peer == "none" else saves,
    }


def _makespan() -> dict[str, Any]:
    runs = []
    for number in range(3):
        slow = 1 + number  # a machine that gets slower for everybody
        for every in (1, 10):
            plain = 0.2 * every * 2 * slow
            runs += [
                _run("none", every, plain, number=number),
                _run("holdfast", every, plain * 1.04, number=number),
                _run("checkfreq", every, plain + 2 * 0.3 * slow, number=number),
            ]
    return {
        "command": "python -m benchmarks makespan",
        "machine": _MACHINE,
        "iteration_seconds": 0.2,
        "runs": runs,
    }


def _table(stall: float) -> dict[str, Any]:
    def figures(seconds: float) -> dict[str, float]:
        return {"stall_seconds": stall * seconds, "done_seconds": seconds, "staged_seconds": seconds / 2}

    peers = {"holdfast": figures(1.0), "torch.save+fsync": {"stall_seconds": 4.0, "done_seconds": 4.0}}
    return {
        "command": "python -m benchmarks table",
        "machine": _MACHINE,
        "image_bytes": 2 << 30,
        "shape": {"ranks": 2, "ring_bytes": 1 << 30},
        "rounds": [peers, {**peers, "raw_mpi": {"done_seconds": 0.4}}],
        "memory": {
            "ranks": {"holdfast": {"extra_bytes": 1 << 30, "extra_peak_bytes": (1 << 30) + (65 << 20)}},
            "stager": {"rss_bytes": 1, "uss_bytes": 2},
        },
        "idle_cpu_percent": {"stager": 0.5, "trainer": 0.5},
        "phases": {"copy_seconds": {"median": 0.1, "least": 0.1, "greatest": 0.2}},
    }


def _rounds(**peers: dict[str, float]) -> list[dict[str, dict[str, float]]]:
    return [dict(peers), dict(peers)]


_TIMES = {"stall_seconds": 0.01, "staged_seconds": 0.2, "done_seconds": 0.4}
_OURS = [_TIMES, _TIMES]
_SMALL, _LARGE = 1 << 20, 1 << 30
_USED = {"write_calls": 7.0, "sleeps": 9.0}
_COUNTED = {
    "image_bytes": _SMALL,
    "sent_bytes": _SMALL,
    "chunks": 5,
    "cpu_seconds": 0.1,
    "rounds": _OURS,
    "ranks": 2,
    "tensors": 100,
    "per_save": {"stager": _USED, "flusher": _USED, "trainer": _USED},
}
_WAITS = {
    "coarse": {"stall_seconds": 0.3, "copy_seconds": 0.4},
    "layer-wise": {"stall_seconds": 0.03, "copy_seconds": 0.4},
}
_ON_CPU = [
    _run(peer, every, 2.0, saves=saves)
    for peer in ("none", "holdfast", "torch.save+fsync")
    for every, saves in ((2, 1), (6, 1))
]
_LOADED = _rounds(
    holdfast={"seconds": 0.4, "read_seconds": 0.2},
    **{way: {"seconds": 1.0} for way in ("torch.load", "torch.load, mmap")},
    **{"raw O_DIRECT read": {"seconds": 0.25}},
)
_FROM_RING = _rounds(holdfast={"seconds": 0.4}, **{"holdfast, from the ring": {"seconds": 0.5}})
_ITERATION = {"iteration_seconds": 0.2}
_COPIED = {"save_seconds": 0.1, "load_seconds": 0.1}
_SAVING = {"tier": 2.2, "none": 2.0, "stall_seconds": 0.01}
_KEPT = {"in_flight": 1, "writers": 2, "restore_seconds": [0.5, 0.6]}
# The least that each experiment's tables and pictures are made of.


def _sharded_cell(mesh: str, peers: tuple[str, ...]) -> dict[str, Any]:
    """holdfast takes 0.4 s and stalls for 0.01 s; the peers take 1, 2, … s and stall for 0.1, 0.2, … s."""
    theirs = {
        peer: {
            "stall_seconds": number / 10,
            "stall_cpu_seconds": number / 20,
            "done_seconds": float(number),
            "written_seconds": 0.9,
        }
        for number, peer in enumerate(peers[1:], 1)
    }
    return {
        "mesh": mesh,
        "ranks": 4,
        "image_bytes": _LARGE,
        "rounds": _rounds(holdfast=_TIMES, **theirs),
        "memory": {
            "ranks": {"holdfast": {"extra_peak_bytes": _LARGE // 4 + (60 << 20)}},
            "peak_bytes": {"stager": _LARGE // 2, "flusher": 3 * _LARGE // 4},
        },
        "sent_bytes": _LARGE + 100,
    }


_CONTENT: dict[str, dict[str, Any]] = {
    "table": _table(0.01),
    "makespan": _makespan(),
    "accuracy": {
        "epochs": 2,
        "shape": {"ranks": 2},
        "restart_epochs": 1,
        "curves": {
            name: [{"epoch": 1, "right": 9, "of": 10, "loss": "0x0p+0"}] for name in ("undisturbed", "killed")
        },
        "times": {"undisturbed": [1.0], "killed": [2.0]},
        "seconds": {"undisturbed": 1.0, "killed": 2.0},
        "kills": [
            {
                "epoch": 1.5,
                "lost_steps": 3,
                "resumed_from": 4,
                "resumption_seconds": 1.0,
                "after_seconds": 0.5,
            }
        ],
        "checkpoints": {"compared": 2, "differences": []},
    },
    "workloads": {
        "image_bytes": {"resnet50": _LARGE},
        "runs": [{"model": "resnet50", **run} for run in _makespan()["runs"]],
        **_ITERATION,
    },
    "flights": {
        "image_bytes": _LARGE,
        "runs": [{"in_flight": 2, **run} for run in _makespan()["runs"]],
        **_ITERATION,
    },
    "cpu": {"runs": _ON_CPU},
    "sizes": {
        "image_bytes": {"gpt2": _LARGE},
        "rounds": {"gpt2": _rounds(holdfast=_TIMES, **{"torch.save+fsync": _TIMES})},
    },
    "rings": {"image_bytes": _LARGE, "cells": [{"ring_bytes": 1 << 27, "rounds": _OURS}]},
    "slices": {"image_bytes": _LARGE, "cells": [{"ranks": 2, "slice_bytes": 1 << 29, "rounds": _OURS}]},
    "scaling": {"cells": [_COUNTED, {**_COUNTED, "ranks": 32}, {**_COUNTED, "tensors": 10}]},
    "growth": {
        "shape": {"ranks": 512, "tensors": 10_000},
        "frames": [
            {"ranks": 2, "frames": 8192, "begin_seconds": 0.1, "frame_seconds": 1e-4, "end_seconds": 0.1},
            {"ranks": 512, "frames": 8192, "begin_seconds": 0.1, "frame_seconds": 2e-4, "end_seconds": 0.1},
        ],
        "prepare": {"split": {"first_seconds": 0.1, "next_seconds": 0.001}},
        "agreement": {"split": {"seconds": 0.2, "received_bytes": 49_000_000, "kept_bytes": 30_000_000}},
        "catalog": {
            "checkpoints": 10_000,
            "looks": {"the newest good one": {"seconds": 0.2, "resident_bytes": _SMALL, "files_opened": 2}},
        },
        "connections": {
            "5 MB/s each": {
                "sent": {
                    "bytes_per_second": 6e8,
                    "most_bytes_per_second": 6.4e8,
                    "connections": 128,
                    "cpu_seconds_per_gb": 0.9,
                }
            }
        },
    },
    "gate": {
        "copy_seconds": 0.4,
        "cells": [{"compute_seconds": 0.1, "update_seconds": 0.2, "rounds": [_WAITS, _WAITS]}],
    },
    "jitter": {"every": 30, "iteration_seconds": {"none": [0.02] * 9, "holdfast": [0.02] * 8 + [0.05]}},
    "steady": {
        "image_bytes": _SMALL,
        "samples": [{"saves": n, "trainer": _LARGE, "stager": _SMALL, "flusher": _SMALL} for n in range(11)],
    },
    "restore": {
        "image_bytes": _LARGE,
        "rounds": _LOADED,
        "ring_rounds": _FROM_RING,
        "fresh_cluster": {"restore_seconds": 1.0},
    },
    "tiers": {
        "slice_bytes": _LARGE,
        "how": {
            "nvme, 1": "O_DIRECT, 1 writer",
            "nvme, 2": "O_DIRECT, 2 writers",
            "memory, 1": "mapped, 1 writer",
        },
        "rounds": _rounds(
            **{
                "nvme, 1": {"seconds": 1.0, "amplification": 1.001},
                "nvme, 2": {"seconds": 0.5, "amplification": 1.002},
                "memory, 1": {"seconds": 0.2, "amplification": 1.003},
                **{f"raw beside {name}": {"seconds": 0.48} for name in ("nvme, 1", "nvme, 2", "memory, 1")},
            }
        ),
        "layouts": {
            "gpt2": {
                "tensors": 148,
                "nbytes": _LARGE,
                "how": "libpmem",
                "rounds": _rounds(apart=_COPIED, interleaved=_COPIED),
            }
        },
    },
    "tiered": {
        "runs": [
            {"tier": "nvme", **_KEPT, "runs": [{"every": every, **_SAVING} for every in (1, 5)]},
            {"tier": "pm", **_KEPT, "runs": [{"coarse": coarse, **_SAVING} for coarse in (True, False)]},
        ]
    },
    "reality": {
        "trace": "made up",
        "rounds": [
            {
                "seconds": 120.0,
                "profile": {"restart_seconds": 8.0, "strategies": {"holdfast": {"restore_seconds": 1.0}}},
                "real": {"useful": 800, "redone": 9, "interruptions": 3, "training_seconds": 90.0},
                "predicted": {"useful": 820, "redone": 10, "interruptions": 3, "training_seconds": 91.0},
            }
        ],
    },
    "switching": {
        "shape": {"model": "gpt2"},
        "rounds": _rounds(
            **{
                way: {f"{phase}_seconds": 1.0 for phase in ("safe", "suspend", "start", "restore", "resume")}
                for way in SWITCHED
            }
        ),
    },
    "interference": {
        "runs": [
            {"name": name, "round": 0, "iteration_seconds": [0.3, 0.1, 0.1], "saved": saved}
            for name, saved in (
                ("isolated, nothing saved", []),
                ("isolated", [0, 20]),
                ("beside, nothing saved", []),
                ("static", [0, 20]),
                ("adaptive", [0, 20, 60]),
            )
        ]
    },
    "transport": {
        "rounds": [
            {
                way: {"seconds": seconds, "cpu_seconds": 0.2, "nbytes": 2e9}
                for way, seconds in (
                    ("holdfast over TCP", 1.1),
                    ("holdfast over TCP with TLS", 3.0),
                    ("bare sockets", 1.0),
                    ("holdfast over MPI", 1.2),
                )
            }
        ],
        "link": [{"seconds": 1.04, "cpu_seconds": 0.1, "nbytes": 0.25e9}],
        "link_bits": 2_000_000_000,
    },
    "launchers": {
        "saves": [
            {
                name: {"stall_seconds": stall, "staged_seconds": 0.5, "done_seconds": 0.9}
                for name, stall in (("mpirun", 0.01), ("torchrun", 0.01))
            }
        ],
        "kills": [
            {
                name: {"seconds": seconds, "start_seconds": seconds - 1, "restore_seconds": restore}
                for name, seconds, restore in (
                    ("mpirun", 9.0, 0.5),
                    ("torchrun", 6.0, 1.75),
                    ("mpirun, bare", 8.5, 0.0),
                    ("torchrun, bare", 4.5, 0.0),
                )
            }
        ],
    },
    "sharded": {
        "cells": [
            _sharded_cell("FSDP2 on 2", ("holdfast", "dcp+to-torch", "dcp-hf", "full-state-dict")),
            _sharded_cell("HSDP on 2 x 2", ("holdfast",)),
        ],
        "restores": [
            {
                "mesh": "FSDP2 on 2",
                "image_bytes": _LARGE,
                "rounds": _rounds(
                    holdfast={"seconds": 0.5, "grown_bytes": 100 << 20, "bytes_read": _LARGE // 2},
                    **{"dcp.load": {"seconds": 1.0, "grown_bytes": 90 << 20}},
                ),
            }
        ],
    },
    "s3": {
        "image_bytes": _LARGE,
        "rounds": _rounds(
            holdfast=_TIMES,
            **{"bare multipart upload": {"done_seconds": 0.3, "server_cpu_seconds": 0.5}},
        ),
        "restores": _rounds(
            holdfast={"seconds": 1.0, "server_cpu_seconds": 1.2},
            s3torchconnector={"seconds": 3.5, "server_cpu_seconds": 2.4},
            **{"bare ranged reads": {"seconds": 0.7, "server_cpu_seconds": 1.1}},
        ),
    },
}


def _shown(name: str) -> dict[str, Any]:
    return {"command": f"python -m benchmarks {name}", "machine": _MACHINE, **_CONTENT[name]}


def test_every_experiment_is_shown() -> None:
    for name in EXPERIMENTS:
        assert callable(experiment(name).measure), name
        grids = experiment(name).grids(_shown(name))
        assert grids, name
        for grid in grids:
            assert grid.rows, name
            assert grid.markdown().count("\n") >= len(grid.rows), name


def test_verdicts_of_the_other_experiments() -> None:
    judged = targets.grid({name: _shown(name) for name in EXPERIMENTS}).rows
    rows, limits = {row[0]: row[2:4] for row in judged}, {row[0]: row[4] for row in judged}
    assert rows["layer-wise / coarse gate, stall"] == (
        "0.10 to 0.10; a third or less in 1 of 1 settings",
        "yes",
    )
    assert rows["PGT-2 on S3: bare multipart upload"] == ("75 (75–75) %", "no")
    assert limits["PGT-2 on S3: bare multipart upload"] == (
        "the server computes 0.5 s for a bare upload, which takes 0.3 s on two cores"
    )
    assert limits["restore from S3, torch.load by s3torchconnector"] == (
        "bare ranged reads alone are 5.0 (5.0–5.0) times faster"
    )
    assert rows["restore from disk, cold, torch.load"] == ("2.5 (2.5–2.5) times", "no")
    assert rows["restore from disk, cold, torch.load with mmap"] == ("2.5 (2.5–2.5) times", "yes")
    assert rows["restore from disk / a raw read"] == ("1.60 (1.60–1.60)", "yes")
    assert rows["restore from the ring / from disk"] == ("1.25 (1.25–1.25)", "no")
    assert rows["restore from S3, torch.load by s3torchconnector"] == ("3.5 (3.5–3.5) times", "yes")
    assert rows["makespan, ResNet-50, every iteration"] == ("4.0 (4.0–4.0) %", "no")
    assert rows["memory over 200 checkpoints"][1] == "yes"
    assert rows["local tiers: bytes written per byte of state"] == ("1.0030", "yes")
    assert rows["NVMe tier: bandwidth of raw O_DIRECT"] == ("96 (96–96) %", "yes")
    assert rows["FSDP2: save() until torch.load opens one file"] == ("FSDP2 on 2: 0.40 (0.40–0.40)", "no")
    assert rows["FSDP2: stall"] == ("FSDP2 on 2: 0.10 (0.10–0.10)", "yes")
    assert rows["FSDP2: memory of a rank beyond its own shards"] == (
        "FSDP2 on 2: share + 60 MiB; HSDP on 2 x 2: share + 60 MiB",
        "yes",
    )
    assert rows["FSDP2: part of the state that a process has"] == (
        "at most 0.75 (FSDP2 on 2, flusher)",
        "yes",
    )
    assert rows["FSDP2: sent by all ranks / image"] == ("FSDP2 on 2: 1.0000; HSDP on 2 x 2: 1.0000", "yes")
    assert rows["FSDP2 on 4 ranks, restored onto another mesh"] == ("FSDP2 on 2: 0.50 (0.50–0.50)", "yes")
    assert rows["FSDP2, restored onto another mesh: memory of a rank"] == ("FSDP2 on 2: 100 MiB", "yes")


def test_what_of_a_stall_the_training_thread_was_on_a_core_is_shown_where_it_was_counted() -> None:
    grids = {grid.title.partition(",")[0]: grid for grid in experiment("sharded").grids(_shown("sharded"))}
    assert ("FSDP2 on 2", "dcp+to-torch", "0.050 (0.050–0.050)") in grids["Of the stall"].rows
    assert {row[1] for row in grids["Of the stall"].rows} == {"dcp+to-torch", "dcp-hf", "full-state-dict"}


def test_figures_of_sharded_state_that_are_not_reached_are_said_to_be() -> None:
    shown = _shown("sharded")
    of_rank = {"ranks": {"holdfast": {"extra_peak_bytes": _LARGE}}, "peak_bytes": {"stager": 0, "flusher": 0}}
    slow = {"holdfast": {"seconds": 1.1, "grown_bytes": 257 << 20}, "dcp.load": {"seconds": 1.0}}
    worse = {
        **shown,
        "cells": [{**cell, "memory": of_rank, "sent_bytes": 2 * _LARGE} for cell in shown["cells"]],
        "restores": [*shown["restores"], {**shown["restores"][0], "rounds": [slow]}],
    }
    met = {row[0]: row[3] for row in targets.grid({"sharded": worse}, only="sharded").rows}
    assert met == {
        "FSDP2: save() until torch.load opens one file": "no",
        "FSDP2: stall": "yes",
        "FSDP2: memory of a rank beyond its own shards": "no",
        "FSDP2: part of the state that a process has": "no",
        "FSDP2: sent by all ranks / image": "no",
        "FSDP2 on 4 ranks, restored onto another mesh": "no",
        "FSDP2, restored onto another mesh: memory of a rank": "no",
    }


def test_what_holdfast_adds_is_taken_beside_the_bare_script_of_the_same_round() -> None:
    shown = _shown("launchers")
    rows = {row[0]: row[2:4] for row in targets.grid({"launchers": shown}, only="launchers").rows}
    added = "all ranks killed: what holdfast adds "
    assert rows[added + "to the start of the same script"] == (
        "mpirun: 0.50 (0.50–0.50); torchrun: 1.50 (1.50–1.50)",
        "no",
    )
    assert rows[added + "for the restore"] == ("mpirun: 0.50 (0.50–0.50); torchrun: 1.75 (1.75–1.75)", "no")
    grid = experiment("launchers").grids(shown)[1]
    assert (
        "mpirun, added by holdfast",
        "0.50 (0.50–0.50)",
        "0.50 (0.50–0.50)",
        "0.50 (0.50–0.50)",
    ) in grid.rows

    older = {name: figures for name, figures in shown["kills"][0].items() if "bare" not in name}
    rows = {row[0]: row[2:4] for row in targets.grid({"launchers": {**shown, "kills": [older]}}).rows}
    assert rows[added + "for the restore"] == ("not measured", "")
    assert [row[0] for row in experiment("launchers").grids({**shown, "kills": [older]})[1].rows] == [
        "mpirun",
        "torchrun",
    ]


def test_an_overhead_is_taken_beside_the_baseline_of_its_own_round() -> None:
    runs = _makespan()["runs"]
    value = overheads(runs, "holdfast", 1)
    assert value is not None
    assert (value.median, value.least, value.greatest) == pytest.approx((0.04, 0.04, 0.04))
    assert overheads(runs, "mlc-base", 1) is None


def test_the_shortest_interval_comes_from_what_a_checkpoint_costs() -> None:
    runs = [_run("none", 1, 0.4), _run("none", 10, 4.0)]
    runs += [_run("a", 1, 0.42), _run("b", 1, 0.9), _run("b", 10, 4.1), _run("c", 10, 5.0)]
    # 0.01 s a checkpoint: every iteration of 0.2 s affords that.
    assert interval_under(runs, "a", 0.2, 0.05) == pytest.approx(1.0)
    # 0.25 s back to back; with ten iterations for it 0.05 s, which every 5 would afford: it was measured from 10 on.
    assert interval_under(runs, "b", 0.2, 0.05) == pytest.approx(10.0)
    assert interval_under(runs, "c", 0.2, 0.05) == pytest.approx(50.0)


def test_verdicts_say_what_is_met_and_what_is_not() -> None:
    documents = {"makespan": _makespan(), "table": _table(0.03)}
    rows = {(row[0], row[1]): row[2:4] for row in targets.grid(documents).rows}
    assert rows["CST, GPT-2, device-like", "at most 1 % of torch.save+fsync"] == ("0.8 (0.8–0.8) %", "yes")
    assert rows["PGT-1: bandwidth of raw MPI", "at least 70 %"] == ("80 (80–80) %", "yes")
    assert rows["PGT-2 against torch.save+fsync", "4 times faster"] == ("4.0 (4.0–4.0) times", "yes")
    assert rows["makespan, GPT-2, every 10 iterations", "within 1 %"] == ("4.0 (4.0–4.0) %", "no")
    assert rows["memory of a rank, N = 1", "slice + 64 MiB"][1] == "no"
    assert rows["PGT-2 against MLC-base", "10 times faster"] == ("not measured", "")
    slower = {(row[0], row[1]): row[2:4] for row in targets.grid({"table": _table(0.05)}).rows}
    assert slower["CST, GPT-2, device-like", "at most 1 % of torch.save+fsync"] == ("1.2 (1.2–1.2) %", "no")


def test_the_machines_limit_stands_beside_the_verdict() -> None:
    table = _table(0.01)
    for figures in table["rounds"]:
        figures["raw_direct"] = {"done_seconds": 0.5}
        figures["raw_over"] = {"done_seconds": 0.5}
        figures["raw_pipeline"] = {"staged_seconds": 0.5, "done_seconds": 0.8}
    resnet = _makespan()
    theirs = [run for run in resnet["runs"] if run["peer"] == "holdfast"]
    resnet["runs"] += [{**run, "peer": "pccheck-like"} for run in theirs]
    resnet["runs"] = [{**run, "model": "resnet50", "every": 1} for run in resnet["runs"]]
    limits = {
        row[0]: row[4]
        for row in targets.grid({"table": table, "makespan": _makespan(), "workloads": resnet}).rows
    }
    assert limits["PGT-2 against torch.save+fsync"] == (
        "a bare pipeline is 5.0 (5.0–5.0) times faster; a raw write alone is 8.0 (8.0–8.0) times faster"
    )
    assert limits["makespan, GPT-2, every 2 iterations"] == (
        "0.4 s are between two; a bare pipeline takes 0.80 s; a raw write alone takes 0.50 s"
    )
    assert limits["PGT-2 against MLC-base"] == ""
    for how in ("a new file", "over an old file"):
        assert (
            limits[f"PGT-2: bandwidth of raw O_DIRECT, {how}"]
            == "bare copy, MPI and write in one pipeline: 62 (62–62) %"
        )
    assert limits["PGT-1: bandwidth of raw MPI"] == "bare copy, MPI and write in one pipeline: 80 (80–80) %"
    assert limits["makespan, ResNet-50, every iteration"].startswith(
        "with the bare copy and write of pccheck-like: "
    )
    assert limits["interval at 5 % overhead, torch.save"].endswith("; a raw write alone takes 0.50 s")


def test_a_table_from_another_machine_than_the_page_names_says_so() -> None:
    page = "<!-- measured: machine -->\n<!-- end -->\n<!-- measured: makespan 0 -->\n<!-- end -->\n"
    other = {**_makespan(), "machine": {**_MACHINE, "processor": "another one"}}
    assert (
        " on "
        not in document.filled(page, {"table": _table(0.01), "makespan": _makespan()}).split("`python")[1]
    )
    filled = document.filled(page, {"table": _table(0.01), "makespan": other})
    assert "`python -m benchmarks makespan` on another one\n" in filled


def test_what_the_host_stole_stands_beside_the_command_where_it_was_counted() -> None:
    page = "<!-- measured: makespan 0 -->\n<!-- end -->\n"
    counted = {**_makespan(), "stolen_share": 0.1234}
    assert "makespan`, 12.3 % of the cores' time stolen by the host\n" in document.filled(
        page, {"makespan": counted}
    )
    assert "makespan`\n" in document.filled(page, {"makespan": _makespan()})


def test_every_target_names_an_experiment() -> None:
    assert {target.experiment for target in targets.TARGETS} <= set(EXPERIMENTS)
    assert {name for name, _, _ in drawing.PICTURES.values()} <= set(EXPERIMENTS)


def test_the_page_is_filled_between_its_markers_and_nowhere_else() -> None:
    page = "before\n<!-- measured: makespan 0 -->\nan older table\n<!-- end -->\nafter\n"
    page += "<!-- measured: s3 -->\n<!-- end -->\n<!-- drawn: intervals s3 -->\n![an older one](x.svg)\n<!-- end -->\n"
    once = document.filled(page, {"makespan": _makespan()})
    assert once.startswith("before\n<!-- measured: makespan 0 -->\n**Overhead in percent")
    assert "an older table" not in once
    assert "| holdfast | 4.0 (4.0–4.0) | 4.0 (4.0–4.0) |" in once
    assert "`python -m benchmarks makespan`\n<!-- end -->\nafter" in once
    assert "Not measured: `python -m benchmarks s3`." in once
    assert re.findall(r"figures/\w+\.svg|x\.svg", once) == ["figures/intervals.svg"], (
        "a picture that nobody has drawn"
    )
    assert document.filled(once, {"makespan": _makespan()}) == once
    with pytest.raises(ValueError, match="the page asks for the picture 'moon'"):
        document.filled("<!-- drawn: moon -->\n<!-- end -->\n", {})
    with pytest.raises(ValueError, match="the page asks for 'moon'"):
        document.filled("<!-- measured: moon -->\n<!-- end -->\n", {})


def test_results_are_adopted_as_they_are(tmp_path: Path) -> None:
    results.write(tmp_path / "results" / "makespan.json", _makespan())
    results.write(tmp_path / "results" / "makespan-quick.json", {})
    taken = document.adopt(tmp_path / "results", tmp_path / "data")
    assert [path.name for path in taken] == ["makespan.json"]
    assert results.read("makespan", tmp_path / "data") == results.read("makespan", tmp_path / "results")


def test_a_picture_is_the_same_each_time_and_says_where_it_is_from(tmp_path: Path) -> None:
    for name, (measured, _, _) in drawing.PICTURES.items():
        shown = _shown(measured)
        first = drawing.draw(name, shown, tmp_path / "a").read_bytes()
        assert drawing.draw(name, shown, tmp_path / "b").read_bytes() == first, name
        assert f"measured by `{shown['command']}`".encode() in first, name
        assert b"dc:date" not in first, name


def test_committed_pictures_and_page_are_those_of_the_committed_figures(tmp_path: Path) -> None:
    pinned = f"matplotlib=={importlib.metadata.version('matplotlib')}\n" in _CONSTRAINTS.read_text(
        encoding="utf-8"
    )
    for name, (measured, _, _) in drawing.PICTURES.items():
        shown = results.read(measured)
        if shown is not None and pinned:  # another matplotlib draws other bytes
            committed = drawing.FOLDER / f"{name}.svg"
            assert drawing.draw(name, shown, tmp_path).read_bytes() == committed.read_bytes(), (
                "run `make figures`"
            )
    page = document.PAGE.read_text(encoding="utf-8")
    documents = {name: results.read(name) for name in EXPERIMENTS}
    assert document.filled(page, documents) == page, "run `make figures`"
