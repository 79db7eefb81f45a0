"""Runs in the guest: writes checkpoint after checkpoint into the mounted run, and announces each on the console.

    GUEST swept 1 ─► part 7 0 ─► part 7 1 ─► ... ─► publish 7 ─► manifest 7 ─► durable 7 ─► part 8 0 ─► ...

File and manifest are written as the flusher does: parts from page-aligned memory, publish, manifest last. The guest
says `durable` only after it has written the manifest: from then on the checkpoint must survive any power cut.
"""

from __future__ import annotations

import mmap
import random
import sys
import zlib
from pathlib import Path

from holdfast.image.manifest import manifest_name, step_file_name
from holdfast.store import open_store
from holdfast.store.base import Store
from tests.support.checkpoints import manifest_of, zip_image

CHUNK_BYTES = 1 << 20
IMAGE_CHUNKS = 4
RUN = "/run/training"


def image_of(step: int) -> memoryview:
    """The image of a step, in page-aligned memory, like the ring's."""
    noise = random.Random(step).randbytes(1 << 16)
    tensor = noise * ((IMAGE_CHUNKS * CHUNK_BYTES - CHUNK_BYTES // 2) // len(noise))
    data = zip_image({"data.pkl": b"step %d" % step, "data/0": tensor, "version": b"3\n"})
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def write_checkpoint(store: Store, step: int) -> None:
    """Write one checkpoint, from the first part to the manifest."""
    image, name, write_id = image_of(step), step_file_name(step), f"write-1-{step}"
    manifest = manifest_of(
        bytes(image),
        step=step,
        chunk_bytes=CHUNK_BYTES,
        tensors={"model/weight": "data/0"},
        write_id=write_id,
    )
    upload = store.begin(name, nbytes=len(image), chunk_bytes=CHUNK_BYTES, write_id=write_id)
    for index, start in enumerate(range(0, len(image), upload.part_bytes)):
        piece = image[start : start + upload.part_bytes]
        say(f"part {step} {index}")
        upload.write_part(index, [piece], zlib.crc32(piece))
    say(f"publish {step}")
    upload.publish()
    say(f"manifest {step}")
    store.write(manifest_name(name), manifest.to_bytes())
    say(f"durable {step}")


def say(words: str) -> None:
    """Print one line on the console, and flush it out of this machine before continuing."""
    sys.stdout.write(f"GUEST {words}\n")
    sys.stdout.flush()


def main(first: int, count: int) -> None:
    """Write `count` checkpoints from step `first`, unless the power is cut."""
    Path(RUN).mkdir(exist_ok=True)
    store = open_store(RUN)
    say(f"swept {len(store.sweep())}")
    for step in range(first, first + count):
        write_checkpoint(store, step)
    say("ended")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
