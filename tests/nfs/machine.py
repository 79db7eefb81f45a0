"""A real NFSv4.1 mount whose client can lose power: nfs-ganesha on this machine, and a QEMU guest that mounts it.

    this machine                                      guest (Linux, QEMU without KVM)
    ganesha 127.0.0.1:port ◄─── NFSv4.1, user net ─── /run          the run, read-write
       └── folders of Python and sources, read-only ─ /usr, ...     the guest runs this very Python and code
    console lines ◄────────────── serial ──────────── tests.nfs.guest

SIGKILL of QEMU is a power cut: the contents of the client kernel's memory are lost. This machine's own kernel needs no
support for NFS. Needs root, since the server opens files by their handles.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["Ganesha", "Guest", "RunElsewhere", "build_initramfs", "missing_parts", "running_ganesha"]

SOURCE = Path(__file__).resolve().parents[2]
_TEMPLATE = Path(__file__).with_name("init.sh")
_MODULES = ("virtio_pci", "virtio_net", "nfsv4")
_SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
_START_SECONDS_MAX = 60.0
_LINE_SECONDS_MAX = 600.0
_END_SECONDS_MAX = 120.0


def missing_parts() -> str:
    """Return why this machine cannot make such a mount, or ""."""
    if os.uname().machine != "x86_64":
        return f"the guest is an x86-64 machine, and this is {os.uname().machine}"
    parts = {
        "qemu-system-x86": shutil.which("qemu-system-x86_64"),
        "nfs-ganesha": shutil.which("ganesha.nfsd"),
        "nfs-ganesha-vfs": next(Path("/usr/lib").glob("*/ganesha/libfsalvfs.so"), None),
        "linux-image-cloud-amd64": _kernel_version(),
        "busybox-static": shutil.which("busybox"),
        "kmod": shutil.which("modprobe", path=_SYSTEM_PATH),
        "cpio": shutil.which("cpio"),
    }
    packages = [name for name, part in parts.items() if part is None]
    if packages:
        return f"Debian packages are missing (make nfs installs them): {' '.join(packages)}"
    if os.geteuid() != 0:
        return "the NFS server opens files by their handles, which only root may"
    return ""


def _kernel_version() -> str | None:
    """The newest installed kernel for virtual machines whose modules are installed too."""
    found = sorted(
        path.name.removeprefix("vmlinuz-")
        for path in Path("/boot").glob("vmlinuz-*-cloud-*")
        if Path("/lib/modules", path.name.removeprefix("vmlinuz-")).is_dir()
    )
    return found[-1] if found else None


def _folders() -> list[Path]:
    """Folders that the guest needs to run this Python, each once."""
    wanted = {Path("/usr"), Path(sys.base_prefix), Path(sys.prefix), SOURCE}
    return sorted(path for path in wanted if not any(other in path.parents for other in wanted))


class RunElsewhere(NamedTuple):
    """Another server that has the run, and a network of this machine on which the guest reaches it.

    Attributes:
        source: Source of the mount, such as `172.31.250.2:/`.
        options: Mount options.
        tap: Device of this machine that is the guest's second network card.
        address: That card's, in a network of 256.
    """

    source: str
    options: str
    tap: str
    address: str


class Ganesha:
    """A running NFS server.

    Attributes:
        exported: The folder that guests see as `/run`.
        port: Its port on the loopback.
    """

    def __init__(self, exported: Path, port: int) -> None:
        self.exported, self.port = exported, port


@contextmanager
def running_ganesha(place: Path) -> Iterator[Ganesha]:
    """Serve `place`/exported, and Python's folders read-only, on the loopback until the block ends."""
    exported, recovery = place / "exported", place / "recovery"
    for folder in (exported, recovery):
        folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    settings, log = place / "ganesha.conf", place / "ganesha.log"
    settings.write_text(_settings(exported, recovery, port))
    server = subprocess.Popen(
        ["ganesha.nfsd", "-F", "-f", settings, "-L", log, "-p", place / "ganesha.pid", "-N", "NIV_WARN"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_port(server, port, log)
        yield Ganesha(exported, port)
    finally:
        server.kill()
        server.wait()


def _settings(exported: Path, recovery: Path, port: int) -> str:
    def export(number: int, path: Path, name: str, access: str) -> str:
        return (
            f'EXPORT {{ Export_Id = {number}; Path = "{path}"; Pseudo = /{name}; Access_Type = {access}; '
            "Squash = No_Root_Squash; SecType = sys; Protocols = 4; Transports = TCP; FSAL { Name = VFS; } }"
        )

    return "\n".join(
        [
            # Only NFSv4: needs no portmapper, lock manager or second port.
            f"NFS_CORE_PARAM {{ NFS_Port = {port}; Protocols = 4; Bind_addr = 127.0.0.1;",
            "    Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }",
            "NFS_KRB5 { Active_krb5 = false; }",
            f'NFSV4 {{ Graceless = true; RecoveryBackend = fs; RecoveryRoot = "{recovery}"; Minor_Versions = 1; }}',
            export(1, exported, "run", "RW"),
            *(export(2 + i, path, f"folder{i}", "RO") for i, path in enumerate(_folders())),
        ]
    )


def _wait_for_port(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS_MAX
    while server.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    tail = log.read_text(errors="replace")[-2000:] if log.exists() else "it wrote no log"
    raise RuntimeError(f"nfs-ganesha does not serve port {port} (exit status {server.poll()}): {tail}")


def build_initramfs(
    place: Path, port: int, arguments: Sequence[str], elsewhere: RunElsewhere | None = None
) -> Path:
    """The guest's first and only file system: busybox, a few modules, and `init.sh` with its gaps filled."""
    version = _kernel_version()
    assert version is not None
    tree, image = place / "initramfs", place / "initramfs.cpio"
    shutil.rmtree(tree, ignore_errors=True)
    for folder in ("bin", "proc", "sys", "dev", "modules", "root"):
        (tree / folder).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, tree / "bin/busybox")
    modules = _modules(version)
    for module in modules:
        shutil.copy(module, tree / "modules")
    filled = {
        "MODULES": " ".join(module.name for module in modules),
        "PORT": str(port),
        "FOLDERS": " ".join(map(str, _folders())),
        "SOURCE": str(SOURCE),
        "PYTHON": sys.executable,
        "ARGUMENTS": " ".join(arguments),
        **_run_of(elsewhere),
    }
    text = _TEMPLATE.read_text()
    for name, value in filled.items():
        text = text.replace(f"@{name}@", value)
    (tree / "init").write_text(text)
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    with image.open("wb") as target:
        subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"], input=names.encode(), stdout=target, cwd=tree, check=True
        )
    return image


def _run_of(elsewhere: RunElsewhere | None) -> dict[str, str]:
    if elsewhere is None:
        options = "$nfs,rsize=1048576,wsize=1048576"
        return {"BEFORE_RUN": "", "RUN_OPTIONS": options, "RUN_SOURCE": "10.0.2.2:/run"}
    options = f"{elsewhere.options},clientaddr={elsewhere.address}"
    # A client without root has no reserved port. Mount it first: later mounts reuse the first one's connection.
    no_root = f'mount -t nfs4 -o "{options},noresvport" {elsewhere.source} /mnt'
    before = [
        f"ifconfig eth1 {elsewhere.address} netmask 255.255.255.0",
        "mkdir -p /mnt",
        f'if {no_root} && ls /mnt; then echo "GUEST failed: served at any port"; else echo "GUEST refused"; fi',
    ]
    return {"BEFORE_RUN": "\n".join(before), "RUN_OPTIONS": options, "RUN_SOURCE": elsewhere.source}


def _modules(version: str) -> list[Path]:
    """Files of the modules with their dependencies, in loading order."""
    found: dict[Path, None] = {}
    for name in _MODULES:
        lines = subprocess.run(
            ["modprobe", "-S", version, "--show-depends", name],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": _SYSTEM_PATH},
        ).stdout.splitlines()
        found |= {Path(line.split()[1]): None for line in lines if line.startswith("insmod ")}
    return list(found)


class Guest:
    """A running guest, and its console output.

    Args:
        port: The port of the server that has Python's folders, and the run unless it is elsewhere.

    Attributes:
        said: Its lines so far, without `GUEST `.
    """

    def __init__(
        self, place: Path, port: int, *, first: int, count: int, elsewhere: RunElsewhere | None = None
    ) -> None:
        self.said: list[str] = []
        self._console = b""
        image = build_initramfs(place, port, [str(first), str(count)], elsewhere)
        # Without KVM, which hangs on some hosts; `max`, since numpy's wheels need more than the oldest x86-64.
        machine = (
            "-accel tcg -cpu max -m 768 -netdev user,id=net -device virtio-net-pci,netdev=net -no-reboot"
        )
        if elsewhere is not None:
            machine += f" -netdev tap,id=run,ifname={elsewhere.tap},script=no,downscript=no"
            machine += " -device virtio-net-pci,netdev=run,mac=52:54:00:12:34:57"
        console = "-display none -monitor none -serial stdio"
        self._qemu = subprocess.Popen(
            [
                "qemu-system-x86_64",
                *machine.split(),
                *console.split(),
                *("-kernel", f"/boot/vmlinuz-{_kernel_version()}"),
                *("-initrd", str(image)),
                # On a busy host the virtual timer may fire too late for the kernel's check of it, which panics.
                *("-append", "console=ttyS0 quiet panic=-1 no_timer_check"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def wait_for(self, line: str) -> None:
        """Read the console until the guest says `line`. Raises `AssertionError` if it fails, ends or stays silent."""
        self._read_until(lambda said: said == line, line)

    def wait_for_number(self, word: str) -> int:
        """Read the console until the guest says `word` and a number; return the number."""
        return int(self._read_until(lambda said: said.startswith(f"{word} "), word).split()[1])

    def kill(self) -> list[str]:
        """Cut the guest's power if it still runs; then read the rest of its output."""
        self._qemu.kill()
        self._qemu.wait()
        assert self._qemu.stdout is not None
        if not self._qemu.stdout.closed:
            self._console += self._qemu.stdout.read()
            self._qemu.stdout.close()
            self._take_lines()
        return self.said

    def wait_ended(self) -> None:
        """Wait until the guest powers itself off."""
        self._qemu.wait(_END_SECONDS_MAX)
        self.kill()

    def durable_steps(self) -> set[int]:
        """The steps that the guest has acknowledged."""
        return {int(line.split()[1]) for line in self.said if line.startswith("durable ")}

    def _read_until(self, is_it: Callable[[str], bool], what: str) -> str:
        assert self._qemu.stdout is not None
        deadline = time.monotonic() + _LINE_SECONDS_MAX
        while True:
            found = next(filter(is_it, self.said), None)
            if found is not None:
                return found
            readable, _, _ = select.select([self._qemu.stdout], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self._qemu.stdout.fileno(), 1 << 16) if readable else b""
            self._console += data
            self._take_lines()
            failed = next((line for line in self.said if line.startswith("failed")), "")
            why = failed or ("" if data else "it ended" if readable else "it did not say so in time")
            assert not why, f"guest, {what!r}: {why}; console:\n{self._console.decode(errors='replace')}"

    def _take_lines(self) -> None:
        whole = self._console.decode(errors="replace").replace("\r", "").split("\n")[:-1]
        self.said = [line.removeprefix("GUEST ") for line in whole if line.startswith("GUEST ")]
