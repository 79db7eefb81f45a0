"""Stand-ins for the CUDA libraries that torch's CUDA build links to; only libcudart is ours and real.

A symbol has the version that torch asks for (`cublasCreate_v2@libcublas.so.13`), or the loader rejects the library. A
stand-in's function returns "not supported".
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["write_stand_ins"]

_SYSTEM = re.compile(r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux.*|libgomp.*)\.so")
# Libraries whose symbols have no version: recognized by the prefix of the names.
_PREFIXES = {
    "libnccl.so.2": "nccl",
    "libcufile.so.0": "cuFile",
    "libcusparseLt.so.0": "cusparseLt",
    "libcuda.so.1": "cu",
}
# Names of other libraries with the driver's prefix.
_NOT_DRIVER = re.compile(r"cu(da|blas|dnn|sparse|solver|pti|fft|rand|File)")
_NOT_SUPPORTED = 801  # cudaErrorNotSupported
# torch calls it before it makes a context; there always is one.
_CONTEXT = (
    "int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) "
    "{ *flags = 0; *active = 1; return 0; }\n"
)


def write_stand_ins(torch_libraries: Path, folder: Path, runtime: Sequence[Path]) -> None:
    """Write stand-ins for all that torch's libraries need; `runtime`: the compiled files of libcudart."""
    needed, wanted = _wants(torch_libraries)
    implemented = _defined(runtime)
    for library in sorted(needed):
        version, symbols = _symbols(library, wanted)
        extra: Sequence[Path] = ()
        code = ""
        if library.startswith("libcudart"):
            symbols -= implemented
            extra = runtime
        elif library == "libcuda.so.1":
            symbols -= {"cuDevicePrimaryCtxGetState"}
            code = _CONTEXT
        _link(folder, library, version, code + _functions(symbols), extra)


def _wants(folder: Path) -> tuple[set[str], dict[str, set[str]]]:
    """Missing libraries, and the undefined symbols by their version."""
    there = {path.name for path in folder.iterdir()}
    needed: set[str] = set()
    wanted: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.glob("lib*.so*")):
        if not path.is_file():
            continue
        found = re.findall(r"NEEDED.*\[(.*)\]", _said("readelf", "-Wd", path))
        needed |= {name for name in found if name not in there and not _SYSTEM.match(name)}
        for line in _said("nm", "-D", "--undefined-only", path).splitlines():
            name, _, version = line.split()[-1].partition("@")
            wanted[version.lstrip("@")].add(name)
    return needed, wanted


def _symbols(library: str, wanted: dict[str, set[str]]) -> tuple[str, set[str]]:
    version = "NVSHMEM" if "nvshmem" in library else library
    symbols = set(wanted.get(version, ()))
    if not symbols:
        version = ""
    prefix = _PREFIXES.get(library)
    if prefix:
        symbols |= {name for name in wanted[""] if name.startswith(prefix)}
    if library == "libcuda.so.1":
        symbols = {name for name in symbols if not _NOT_DRIVER.match(name)}
    return version, symbols


def _defined(objects: Iterable[Path]) -> set[str]:
    lines = [line for path in objects for line in _said("nm", "--defined-only", path).splitlines()]
    return {line.split()[-1] for line in lines}


def _functions(symbols: Iterable[str]) -> str:
    names = sorted(name for name in symbols if re.fullmatch(r"\w+", name))
    return "".join(f"long {name}(void) {{ return {_NOT_SUPPORTED}; }}\n" for name in names)


def _link(folder: Path, library: str, version: str, code: str, objects: Sequence[Path]) -> None:
    source = folder / f"{library.partition('.')[0]}_stand_ins.c"
    source.write_text(code)
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{library}"]
    if version:
        script = source.with_suffix(".map")
        script.write_text(f"{version} {{ global: *; }};\n")
        flags.append(f"-Wl,--version-script={script}")
    compiled = source.with_suffix(".o")
    # -w: the compiler knows some of these names with other types.
    _said("gcc", "-w", "-fPIC", "-c", source, "-o", compiled)
    _said("g++", *flags, compiled, *objects, "-o", folder / library)


def _said(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout
