"""A real flusher process on a real directory, with real files of `torch.save`; the stager is played by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from holdfast.ring import SlotState
from tests.support.images import Image, from_torch_file
from tests.support.stager_client import FlusherProcess, StagerClient

CHUNK_BYTES = 64 * 1024
RANKS = 3

Start = Callable[..., FlusherProcess]
Attach = Callable[[Path], StagerClient]


@pytest.fixture
def attach() -> Iterator[Attach]:
    attached: list[StagerClient] = []

    def one(directory: Path) -> StagerClient:
        attached.append(StagerClient(directory))
        return attached[-1]

    yield one
    for stager in attached:
        stager.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[FlusherProcess] = []

    def one(*options: str, **sizes: str) -> FlusherProcess:
        started.append(FlusherProcess(tmp_path, *options, **sizes))
        return started[-1]

    yield one
    for flusher in started:
        if flusher.process.poll() is None:
            flusher.kill()
        assert flusher.process.stdout is not None
        flusher.process.stdout.close()
    log = (tmp_path / "flusher.log").read_text() if (tmp_path / "flusher.log").exists() else ""
    print(log)
    assert "Traceback" not in log


def state(seed: int, *, rows: int = 400) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"layer.{n}": torch.randn(rows, 101) for n in range(4)} | {"step": torch.tensor(seed)}


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return image_of(tmp_path, 1)


def image_of(tmp_path: Path, seed: int, *, rows: int = 400) -> Image:
    path = tmp_path / f"original-{seed}-{rows}.pt"
    torch.save(state(seed, rows=rows), path)
    return from_torch_file(path, chunk_bytes=CHUNK_BYTES, ranks=RANKS)


def assert_loads(path: Path, seed: int, *, rows: int = 400) -> None:
    """In a process that has never heard of holdfast."""
    code = (
        "import sys, torch; torch.manual_seed(int(sys.argv[2]));"
        "want = {f'layer.{n}': torch.randn(int(sys.argv[3]), 101) for n in range(4)};"
        "got = torch.load(sys.argv[1], weights_only=True);"
        "assert all(torch.equal(got[name], tensor) for name, tensor in want.items())"
    )
    subprocess.run([sys.executable, "-c", code, str(path), str(seed), str(rows)], check=True, cwd="/")
    subprocess.run([sys.executable, "-m", "zipfile", "-t", str(path)], check=True, stdout=subprocess.DEVNULL)


def test_checkpoints_become_files_that_torch_loads_and_the_flusher_leaves_nothing_behind(
    start: Start, attach: Attach, tmp_path: Path, image: Image
) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    assert stager.welcome["store_url"] == str(flusher.store)
    assert stager.welcome["attempt"] == 1
    stager.save(image, 5)
    second = image_of(tmp_path, 2)
    stager.save(second, 10)
    durable = stager.wait("durable", step=5).fields
    assert durable["file"] == "step-000000005.pt"
    assert durable["pgt2_seconds"] >= 2.0
    stager.wait("verified", step=5)
    stager.finish()
    assert [m.kind for m in stager.heard if m.kind in {"failed", "bad"}] == []
    assert flusher.wait() == 0

    assert (flusher.store / "step-000000005.pt").read_bytes() == image.final
    assert_loads(flusher.store / "step-000000010.pt", 2)
    assert flusher.visible() == [
        "step-000000005.json",
        "step-000000005.pt",
        "step-000000010.json",
        "step-000000010.pt",
    ]
    assert flusher.hidden() == []
    assert not flusher.directory.exists()
    manifest = flusher.manifest(10)
    assert (manifest["state"], manifest["attempt"], manifest["run"]) == ("verified", 1, "run")
    assert manifest["ranks"] == RANKS
    assert manifest["layout_digest"] == second.layout.digest
    assert 2.0 <= manifest["pgt1_seconds"] <= manifest["pgt2_seconds"]
    assert manifest["record"]["flusher"].keys() >= {"verify_seconds", "write_seconds", "publish_seconds"}
    assert set(manifest["record"]["ranks"]) == {"0", "1", "2"}
    claim = json.loads((flusher.store / ".holdfast" / "writer-000001.json").read_text())
    assert claim["released"] is True


def test_an_image_larger_than_the_ring_streams_through_it(
    start: Start, attach: Attach, tmp_path: Path
) -> None:
    flusher = start("--no-verify", ring="512KiB")
    large = image_of(tmp_path, 3, rows=2500)
    assert large.layout.chunks > 7 * 8
    stager = attach(flusher.directory)
    assert stager.welcome["ring_chunks"] == 8
    stager.save(large, 1)
    stager.finish()
    assert flusher.wait() == 0
    assert_loads(flusher.store / "step-000000001.pt", 3, rows=2500)
    assert flusher.manifest(1)["state"] == "durable"


def test_a_flipped_byte_is_named_and_never_published_and_the_next_step_is_fine(
    start: Start, attach: Attach, image: Image
) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    entry = next(e for e in image.layout.entries if e.name.endswith("/data/1"))
    middle = entry.offset + entry.nbytes // 2
    stager.save(image, 5, flip=(middle // CHUNK_BYTES, middle % CHUNK_BYTES))
    failed = stager.wait("failed", step=5).fields
    assert failed["code"] == "damage"
    assert "state/1" in failed["message"]
    assert f"chunk {middle // CHUNK_BYTES} from rank" in failed["message"]
    assert flusher.visible() == []
    stager.save(image, 6)
    stager.finish()
    assert flusher.wait() == 0
    assert flusher.visible() == ["step-000000006.json", "step-000000006.pt"]
    assert flusher.hidden() == []


def test_stager_that_dies_leaves_what_was_staged_and_nothing_partial(
    start: Start, attach: Attach, image: Image
) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    stager.save(image, 5)
    stager.begin(image, 6)
    stager.send(image, 6, [0, 2])
    stager.ring.mark_filling(stager.free_slot(), 1, 6, 3)
    stager.close()
    assert flusher.wait() == 0
    assert flusher.visible() == ["step-000000005.json", "step-000000005.pt"]
    assert flusher.hidden() == []
    assert flusher.manifest(5)["state"] == "verified"
    (gone,) = flusher.happened("flush_failed")
    assert gone["step"] == 6
    assert gone["code"] == "peer_lost"


def test_a_staged_checkpoint_in_the_ring_survives_a_killed_flusher(
    start: Start, attach: Attach, tmp_path: Path, image: Image
) -> None:
    first = start()
    stager = attach(first.directory)
    first.freeze()  # it takes nothing out of the ring any more
    stager.save(image, 5)
    stager.begin(image, 6)
    stager.send(image, 6, [0])
    first.kill()
    assert first.visible() == []
    second = start("--linger")
    assert second.said["attempt"] == 2
    assert_loads(second.store / "step-000000005.pt", 1)
    assert second.visible() == ["step-000000005.json", "step-000000005.pt"]
    assert second.manifest(5)["attempt"] == 1
    assert [line["step"] for line in second.happened("recovered")] == [5]
    assert [line["step"] for line in second.happened("flush_failed")] == [6]
    stager.close()
    again = attach(second.directory)
    assert all(again.ring.state(slot) is SlotState.FREE for slot in range(again.ring.ring_chunks))
    again.save(image, 7)
    again.finish()
    assert second.visible()[-1] == "step-000000007.pt"


def test_a_killed_flusher_with_a_half_written_file_leaves_nothing_that_counts(
    start: Start, attach: Attach, image: Image
) -> None:
    first = start()
    stager = attach(first.directory)
    stager.begin(image, 5)
    stager.send(image, 5, [0, 1])
    stager.wait("freed")
    first.freeze()
    stager.send(image, 5, range(2, image.layout.chunks))
    stager.staged(image, 5)
    first.kill()
    assert first.hidden() != []
    second = start("--linger")
    assert second.visible() == []
    assert second.hidden() == []
    (lost,) = second.happened("flush_failed")
    assert "had already left the ring" in lost["message"]


def test_a_damaged_ring_does_not_keep_the_next_flusher_from_starting(start: Start) -> None:
    first = start()
    first.freeze()
    with (first.directory / "journal").open("r+b") as file:
        file.write(b"garbage!")
    first.kill()
    second = start("--linger")
    assert second.said["ready"] is True
    assert len(second.happened("ring_lost")) == 1


def test_a_second_flusher_of_the_same_run_is_refused_and_names_the_first(
    start: Start, attach: Attach, image: Image
) -> None:
    first = start()
    second = start()
    assert second.wait() == 8
    assert second.said["error"]["code"] == "fenced"
    assert str(first.process.pid) in second.said["error"]["message"]
    stager = attach(first.directory)
    stager.save(image, 1)
    stager.finish()
    assert first.wait() == 0


def test_a_second_stager_is_refused_and_names_the_first(start: Start, attach: Attach, image: Image) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    with pytest.raises(AssertionError, match="is already the stager of this run"):
        attach(flusher.directory)
    stager.save(image, 1)
    stager.finish()


def test_start_up_errors_say_why_and_give_the_exit_code(start: Start, tmp_path: Path) -> None:
    broken = start(ring="1KiB")
    assert broken.wait() == 2
    assert broken.said["error"]["code"] == "config"
    assert "ring_bytes" in broken.said["error"]["message"]
    (tmp_path / "store").write_text("a file where a directory should be")
    broken = start()
    assert broken.wait() == 4
    assert str(tmp_path / "store") in broken.said["error"]["message"]


def test_sigterm_publishes_what_is_staged_and_gives_up_the_rest(
    start: Start, attach: Attach, image: Image
) -> None:
    flusher = start("--linger")
    stager = attach(flusher.directory)
    stager.save(image, 5)
    stager.begin(image, 6)
    stager.send(image, 6, [1])
    stager.wait("began", step=6)
    flusher.process.terminate()
    assert "told to end" in stager.wait("failed", step=6).fields["message"]
    assert flusher.wait() == 0
    assert flusher.visible() == ["step-000000005.json", "step-000000005.pt"]
    assert flusher.hidden() == []
    assert not flusher.directory.exists()


def test_an_aborted_step_gives_its_slots_back(start: Start, attach: Attach, image: Image) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    for step in range(6):  # together more chunks than the ring holds
        stager.begin(image, step)
        stager.send(image, step, range(5))
        stager.channel.send("abort", attempt=1, step=step, reason="rank 2 declined")
        assert "rank 2 declined" in stager.wait("failed", step=step).fields["message"]
    stager.save(image, 9)
    stager.finish()
    assert flusher.wait() == 0
    assert flusher.visible() == ["step-000000009.json", "step-000000009.pt"]
    assert flusher.hidden() == []


def test_retention_keeps_the_last_and_every_kth(start: Start, attach: Attach, image: Image) -> None:
    flusher = start("--keep-last", "2", "--keep-every", "4")
    stager = attach(flusher.directory)
    for step in range(1, 9):
        stager.save(image, step)
        stager.wait("durable", step=step)
    stager.finish()
    assert flusher.wait() == 0
    kept = [f"step-{step:09d}.{kind}" for step in (4, 7, 8) for kind in ("json", "pt")]
    assert flusher.visible() == kept


def test_a_lingering_flusher_gives_the_next_job_its_own_attempt_and_overwrites_nothing(
    start: Start, attach: Attach, tmp_path: Path, image: Image
) -> None:
    flusher = start("--linger")
    stager = attach(flusher.directory)
    stager.save(image, 5)
    stager.finish()
    other = image_of(tmp_path, 2)
    again = attach(flusher.directory)
    assert again.attempt == 2
    again.save(other, 5)
    assert again.wait("durable", step=5).fields["file"] == "step-000000005-a002.pt"
    again.save(other, 5)
    assert "already published" in again.wait("failed", step=5).fields["message"]
    again.finish()
    assert (flusher.store / "step-000000005.pt").read_bytes() == image.final
    assert (flusher.store / "step-000000005-a002.pt").read_bytes() == other.final
    flusher.process.terminate()
    assert flusher.wait() == 0


@pytest.mark.parametrize("what", ["kind", "attempt", "json"])
def test_a_stager_that_breaks_the_protocol_counts_as_gone(
    start: Start, attach: Attach, image: Image, what: str
) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    stager.save(image, 5)
    if what == "kind":
        stager.channel.send("drained")
    elif what == "attempt":
        stager.channel.send("staged", attempt=7, step=5)
    else:
        stager.channel._socket.send(b"{")
    stager.wait("refused")
    assert flusher.wait() == 0
    assert flusher.visible() == ["step-000000005.json", "step-000000005.pt"]


def test_another_writer_that_took_the_run_over_ends_this_one(
    start: Start, attach: Attach, image: Image
) -> None:
    flusher = start()
    stager = attach(flusher.directory)
    claim = json.loads((flusher.store / ".holdfast" / "writer-000001.json").read_text())
    other = claim | {"attempt": 2, "write_id": "other", "host": "elsewhere", "boot_id": "x"}
    (flusher.store / ".holdfast" / "writer-000002.json").write_text(json.dumps(other))
    stager.save(image, 5)
    refused = stager.wait("refused").fields
    assert refused["code"] == "fenced"
    assert "elsewhere" in refused["message"]
    assert flusher.wait() == 8
    assert flusher.visible() == []


def test_the_journal_is_believed_when_messages_were_lost(start: Start, attach: Attach, image: Image) -> None:
    flusher = start(ring="2MiB")
    stager = attach(flusher.directory)
    stager.tells = set()
    stager.save(image, 5)  # complete in the ring, and not a word of it said
    stager.tells = {"begin"}
    stager.save(image, 6)
    stager.close()
    assert flusher.wait() == 0
    assert flusher.visible() == [f"step-{step:09d}.{kind}" for step in (5, 6) for kind in ("json", "pt")]
    assert (flusher.store / "step-000000006.pt").read_bytes() == image.final


def test_the_claim_shows_a_sign_of_life_while_nothing_happens(start: Start) -> None:
    flusher = start("--heartbeat-seconds", "0.05", "--linger")
    claim = flusher.store / ".holdfast" / "writer-000001.json"
    until = time.monotonic() + 30
    while json.loads(claim.read_text())["beat"] < 3:
        assert time.monotonic() < until
        time.sleep(0.02)
    flusher.process.terminate()
    assert flusher.wait() == 0
    assert json.loads(claim.read_text())["released"] is True
