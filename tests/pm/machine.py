"""A QEMU guest with simulated persistent memory, which can lose power: Linux uses a range of its memory as PM.

    file memory.img ── all of the guest's memory, shared ── memmap=256M!1G ── /dev/pmem0 ── ext4, dax=always
    file disk.img   ── ext4, read-only: this Python, its packages, the sources ── /

SIGKILL of QEMU is a power cut: the kernel's page cache and journal are lost, bytes stored in the range are in the file,
and the next guest finds them there. The CPU's caches are not modelled: a missing flush stays unnoticed here.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.nfs.machine import _kernel_version

__all__ = ["Guest", "build_disk", "missing_parts"]

SOURCE = Path(__file__).resolve().parents[2]
_TEMPLATE = Path(__file__).with_name("init.sh")
_MODULES = ("virtio_pci", "virtio_blk", "nd_e820", "nd_pmem")
_PACKAGES = (
    "annotated_types",
    "isal",
    "numpy",
    "numpy.libs",
    "pydantic",
    "pydantic_core",
    "typing_inspection",
)
_LIBPMEM = Path("/lib/x86_64-linux-gnu/libpmem.so.1")
_PATH = {"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}
_MEMORY = "1536M"
_SECONDS_MAX = 600.0


def missing_parts() -> str:
    """Return why this machine cannot run such a guest, or ""."""
    if os.uname().machine != "x86_64":
        return f"the guest is an x86-64 machine, and this is {os.uname().machine}"
    parts = {
        "qemu-system-x86": shutil.which("qemu-system-x86_64"),
        "linux-image-cloud-amd64": _kernel_version(),
        "busybox-static": shutil.which("busybox"),
        "kmod": shutil.which("modprobe", path=_PATH["PATH"]),
        "cpio": shutil.which("cpio"),
        "e2fsprogs": shutil.which("mkfs.ext4", path=_PATH["PATH"]),
        "libpmem1": _LIBPMEM if _LIBPMEM.exists() else None,
    }
    packages = [name for name, part in parts.items() if part is None]
    return f"Debian packages are missing (make pm installs them): {' '.join(packages)}" if packages else ""


def build_disk(place: Path) -> Path:
    """An ext4 image with this Python without its tests, the packages that tiers need, and the sources."""
    tree, image = place / "disk", place / "disk.img"
    skip = shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "config-*", "ensurepip")
    version = f"python3.{sys.version_info.minor}"
    base = tree / sys.base_prefix.lstrip("/")
    shutil.copytree(Path(sys.base_prefix, "lib", version), base / "lib" / version, ignore=skip)
    (base / "bin").mkdir()
    python = shutil.copy(Path(sys.base_prefix, "bin", version), base / "bin")
    packages = Path(sys.prefix, "lib", version, "site-packages")
    for name in _PACKAGES:
        shutil.copytree(packages / name, tree / "packages" / name, ignore=skip)
    shutil.copy(packages / "typing_extensions.py", tree / "packages")
    for name in ("holdfast", "trainer_side"):
        shutil.copytree(SOURCE / name, tree / "source" / name, ignore=skip)
    (tree / "source/tests/pm").mkdir(parents=True)
    (tree / "source/tests/support").mkdir()
    for name in (
        "__init__",
        "pm/__init__",
        "pm/guest",
        "support/__init__",
        "support/images",
        "support/tiers",
    ):
        shutil.copy(SOURCE / f"tests/{name}.py", tree / f"source/tests/{name}.py")
    for name in ("proc", "dev", "mnt", "sbin", "lib64", "lib/x86_64-linux-gnu"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    mkfs = shutil.copy(shutil.which("mkfs.ext4", path=_PATH["PATH"]) or "", tree / "sbin")
    shutil.copy(_LIBPMEM, tree / "lib/x86_64-linux-gnu")
    for library in _libraries([Path(mkfs), Path(python), _LIBPMEM, *tree.rglob("*.so")]):
        (tree / str(library.parent).lstrip("/")).mkdir(parents=True, exist_ok=True)
        shutil.copy(library, tree / str(library.parent).lstrip("/"))
    with image.open("wb") as file:
        file.truncate(1 << 30)
    subprocess.run(["mkfs.ext4", "-q", "-d", tree, image], check=True, env=_PATH)
    shutil.rmtree(tree)
    return image


def _libraries(files: list[Path]) -> set[Path]:
    said = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    found = {Path(path) for path in re.findall(r"(/\S+\.so\S*) \(", said)}
    return {path for path in found if not path.is_relative_to(SOURCE) and "/disk/" not in str(path)}


def _initramfs(place: Path, attempt: int, count: int) -> Path:
    version = _kernel_version()
    tree, image = place / "initramfs", place / "initramfs.cpio"
    shutil.rmtree(tree, ignore_errors=True)
    for folder in ("bin", "proc", "sys", "dev", "modules", "root"):
        (tree / folder).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", tree / "bin/busybox")
    modules: dict[str, None] = {}
    for name in _MODULES:
        command = ["modprobe", "-S", str(version), "--show-depends", name]
        lines = subprocess.run(
            command, capture_output=True, text=True, check=True, env=_PATH
        ).stdout.splitlines()
        modules |= {line.split()[1]: None for line in lines if line.startswith("insmod ")}
    for module in modules:
        shutil.copy(module, tree / "modules")
    text = _TEMPLATE.read_text()
    for name, value in {
        "MODULES": " ".join(Path(module).name for module in modules),
        "LIBRARIES": f"/lib/x86_64-linux-gnu:{sys.base_prefix}/lib",
        "PYTHON": f"{sys.base_prefix}/bin/python3.{sys.version_info.minor}",
        "ATTEMPT": str(attempt),
        "COUNT": str(count),
    }.items():
        text = text.replace(f"@{name}@", value)
    (tree / "init").write_text(text)
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    with image.open("wb") as target:
        subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"], input=names.encode(), stdout=target, cwd=tree, check=True
        )
    return image


class Guest:
    """A running guest, and its console output.

    Attributes:
        said: Its lines so far, without `GUEST `.
    """

    def __init__(self, place: Path, disk: Path, *, attempt: int, count: int) -> None:
        self.said: list[str] = []
        self._console = b""
        machine = f"-accel tcg -cpu max -machine pc,memory-backend=ram -m {_MEMORY} -no-reboot -nic none"
        console = "-display none -monitor none -serial stdio"
        memory = f"memory-backend-file,id=ram,size={_MEMORY},mem-path={place / 'memory.img'},share=on"
        self._qemu = subprocess.Popen(
            [
                "qemu-system-x86_64",
                *machine.split(),
                *console.split(),
                *("-object", memory, "-drive", f"file={disk},format=raw,if=virtio,readonly=on"),
                *("-kernel", f"/boot/vmlinuz-{_kernel_version()}"),
                *("-initrd", str(_initramfs(place, attempt, count))),
                *("-append", "console=ttyS0 quiet panic=-1 no_timer_check memmap=256M!1024M"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def wait_for(self, beginning: str) -> str:
        """Wait for the first line with this prefix. Raises AssertionError if the guest fails, ends or stays silent."""
        assert self._qemu.stdout is not None
        deadline = time.monotonic() + _SECONDS_MAX
        while True:
            self._take_lines()
            found = next((line for line in self.said if line.startswith(beginning)), None)
            if found is not None:
                return found
            failed = next((line for line in self.said if line.startswith("failed")), None)
            assert failed is None, f"{failed}; the console says: {self._console[-2000:]!r}"
            ready, _, _ = select.select([self._qemu.stdout], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._qemu.stdout.fileno(), 1 << 16) if ready else b""
            assert data, f"no {beginning!r}; the console says: {self._console[-2000:]!r}"
            self._console += data

    def kill(self) -> list[str]:
        """Cut the guest's power if it still runs; return its whole output."""
        self._qemu.kill()
        self._qemu.wait()
        assert self._qemu.stdout is not None
        if not self._qemu.stdout.closed:
            self._console += self._qemu.stdout.read()
            self._qemu.stdout.close()
        self._take_lines()
        return self.said

    def _take_lines(self) -> None:
        whole = self._console[: self._console.rfind(b"\n") + 1].decode(errors="replace")
        self.said = [line[6:].rstrip() for line in whole.splitlines() if line.startswith("GUEST ")]
