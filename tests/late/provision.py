"""torch's CUDA build and the libraries under it, made once: unpacked wheels, compiled sources.

    pip download ─► wheels unpacked ─► which symbols does torch need? ─► ours compiled, stand-ins for the rest

They lie in .services/late, or in the folder that LATE_HOME names, which several working copies may share.
`python -m tests.late --install` makes them ahead of time. LATE_TORCH names another version of torch than the default.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.late.stand_ins import write_stand_ins

__all__ = ["HERE", "LateRuntime", "NoLateRuntime", "install"]

HERE = Path(__file__).resolve().parent
_ROOT = HERE.parents[1]
_TORCH = "2.13.0"
_HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
_DOWNLOAD_SECONDS_MAX = 600


class NoLateRuntime(Exception):
    """The runtime cannot be made on this machine; the message says what is missing."""


@dataclass(frozen=True)
class LateRuntime:
    """The result of `install`.

    Attributes:
        torch: The folder to import torch's CUDA build from.
        libraries: Libraries that torch loads in place of CUDA's.
    """

    torch: Path
    libraries: Path

    def environment(
        self, *, policy: str = "side_lazy", devices: int = 1, device_mib: int = 1024
    ) -> dict[str, str]:
        """The variables of a process that sees `devices` devices, with `device_mib` of memory each."""
        return {
            "PYTHONPATH": os.pathsep.join(map(str, (self.torch, self.libraries, _ROOT))),
            "LD_LIBRARY_PATH": str(self.libraries),
            "LATE_KERNELS": str(self.libraries / "libkernels.so"),
            "LATE_POLICY": policy,
            "LATE_DEVICES": str(devices),
            "LATE_MIB": str(device_mib),
        }


def install() -> LateRuntime:
    """Make the missing parts; several processes may call this at the same time.

    Raises:
        NoLateRuntime: With the part that could not be made, and why.
    """
    missing = [tool for tool in ("gcc", "g++", "readelf", "nm") if shutil.which(tool) is None]
    if missing:
        raise NoLateRuntime(f"the late runtime cannot be compiled: there is no {', '.join(missing)}")
    home = Path(os.environ.get("LATE_HOME") or _ROOT / ".services" / "late")
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            torch = _unpacked(home)
            return LateRuntime(torch, _compiled(home, torch))
        except subprocess.TimeoutExpired as error:
            raise NoLateRuntime(f"torch's CUDA build was not there within {error.timeout:.0f} s") from error
        except subprocess.CalledProcessError as error:
            raise NoLateRuntime(f"the late runtime cannot be made: {error.stderr.strip()[-600:]}") from error


def _unpacked(home: Path) -> Path:
    """Download and unpack torch's CUDA build and CUDA's headers, from pip's index."""
    version = os.environ.get("LATE_TORCH") or _TORCH
    # `===`: exactly this version, and not its CPU build, which some indexes call 2.13.0+cpu.
    torch = f"torch==={version}"
    wanted = "\n".join((torch, *_HEADERS))
    # Each version has a folder of its own, so that two runs at the same time do not replace each other's.
    folder = home / "-".join(
        ("torch", *([version] if version != _TORCH else []), sysconfig.get_config_var("SOABI"))
    )
    stamp = folder / "wanted"
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=home) as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        # No cache: it would store the wheel of half a gigabyte a second time.
        _run([*pip, "--no-cache-dir", "--dest", wheels, torch, *_HEADERS])
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as packed:
                # Skip CUDA's libraries: torch would find them before ours.
                packed.extractall(folder, [name for name in packed.namelist() if "cu13/lib/" not in name])
            if wheel.name.startswith("torch-") and not (folder / "torch/lib/libtorch_cuda.so").exists():
                raise NoLateRuntime(f"the index has a build of torch without CUDA: {wheel.name}")
    # zipfile drops this mode, and torch will not start without it.
    (folder / "torch/bin/torch_shm_manager").chmod(0o755)
    stamp.write_text(wanted)
    return folder


def _compiled(home: Path, torch: Path) -> Path:
    """The compiled libraries of these sources; those of other sources stay, for another working copy."""
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])
    seen = hashlib.sha256(str(torch).encode())
    for source in [*sources, HERE / "stand_ins.py", HERE / "provision.py"]:
        seen.update(source.read_bytes())
    folder = home / f"libraries-{seen.hexdigest()[:16]}"
    if (folder / "made").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    flags = ["-std=c++20", "-fPIC", f"-I{torch}/nvidia/cu13/include"]
    runtime = [path for path in sources if path.suffix == ".cpp" and path.name != "kernels.cpp"]
    objects = [folder / f"{path.stem}.o" for path in runtime]
    for source, compiled in zip(runtime, objects, strict=True):
        _run(["g++", *flags, "-O1", "-Wall", "-c", str(source), "-o", str(compiled)])
    write_stand_ins(torch / "torch" / "lib", folder, objects)
    include = torch / "torch" / "include"
    # -O0: the templates of ATen's headers take most of the time, and nothing here is called often.
    # -w: their warnings are not ours.
    _run(
        [
            *("g++", *flags, "-O0", "-w", "-shared", str(HERE / "kernels.cpp")),
            *(f"-I{include}", f"-I{include}/torch/csrc/api/include"),
            *("-o", str(folder / "libkernels.so")),
            *(f"-L{torch}/torch/lib", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"),
            *(f"-L{folder}", "-l:libcudart.so.13", "-Wl,--allow-shlib-undefined"),
        ]
    )
    # torch loads entry points registered like this in each process that imports it.
    registered = folder / "late-1.dist-info"
    registered.mkdir()
    (registered / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1\n")
    (registered / "entry_points.txt").write_text("[torch.backends]\nlate = tests.late.backend:load\n")
    (folder / "made").touch()
    return folder


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS_MAX)
