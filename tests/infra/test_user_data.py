"""The rendered user data: accepted by cloud-init, clean for shellcheck and systemd, and run, twice, for real.

The bootstrap runs as root in a temporary overlay of this machine's file system: useradd, venv, pip and the metadata
service's protocol are real, and pip installs this source. systemctl (no systemd runs here) and the metadata service are
simulated. dnf and apt-get, the mount of EFS, and cloud-init itself do not run.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]

from tests.infra.rendered import Rendered
from tests.infra.toolbox import INFRA, tool
from tests.support.moto_s3 import running_moto

ROOT = INFRA.parent
NODES = {
    "minimal train": "trainers",
    "minimal stager": "stager",
    "efs train": "trainers",
    "efs stager": "stager",
}
KEYS = INFRA / "modules/node/files/keys.py"
# As in infra/examples/cluster/tests.
PACKAGE = "holdfast[stager,openmpi] @ https://wheels.example/YOU/holdfast-0.2.0-py3-none-any.whl"

needs_overlay = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("useradd") is None,
    reason="the bootstrap runs as root in an overlay mount, which this user may not make",
)


@pytest.fixture(params=list(NODES))
def user_data(request: pytest.FixtureRequest, minimal: dict[str, Rendered], efs: Rendered) -> str:
    rendered = minimal["whole"] if request.param.startswith("minimal") else efs
    return node_data(rendered, NODES[request.param])


def node_data(rendered: Rendered, module: str) -> str:
    import base64

    template = rendered.one(f"module.{module}.module.node.aws_launch_template.this")
    return base64.b64decode(template["user_data"]).decode()


def files_of(user_data: str) -> dict[str, dict[str, str]]:
    document = yaml.safe_load(user_data)
    return {item["path"]: item for item in document["write_files"]}


def test_user_data_has_the_size_and_shape_that_ec2_and_cloud_init_take(user_data: str) -> None:
    assert user_data.startswith("#cloud-config\n")
    assert len(user_data.encode()) <= 16384
    document = yaml.safe_load(user_data)
    assert set(document) == {"write_files", "runcmd"}
    assert document["runcmd"] == [["/usr/local/sbin/holdfast-bootstrap"]]
    assert {item["permissions"] for item in document["write_files"]} == {"0644", "0755"}


@pytest.mark.skipif(
    shutil.which("cloud-init") is None, reason="cloud-init is not on this machine (make infra installs it)"
)
def test_cloud_inits_own_schema_takes_it(user_data: str, tmp_path: Path) -> None:
    path = tmp_path / "user-data"
    path.write_text(user_data)
    done = subprocess.run(
        ["cloud-init", "schema", "--config-file", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valid" in done.stdout
    path.write_text("#cloud-config\n" + yaml.safe_dump({**yaml.safe_load(user_data), "runcmd": 5}))
    wrong = subprocess.run(
        ["cloud-init", "schema", "--config-file", path], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 1
    assert "runcmd" in wrong.stdout + wrong.stderr


def test_shellcheck_has_nothing_to_say(user_data: str, tools: Path, tmp_path: Path) -> None:
    scripts = [
        *(
            path
            for path in (INFRA / "docker").rglob("*")
            if path.is_file() and path.read_bytes().startswith((b"#!/bin/sh", b"#!/bin/bash"))
        ),
        *INFRA.glob("modules/*/files/*.sh"),
        *INFRA.glob("slurm/*.sbatch"),
    ]
    assert len(scripts) >= 5
    for name, item in files_of(user_data).items():
        if item["content"].startswith("#!"):
            scripts.append(tmp_path / name.replace("/", "_"))
            scripts[-1].write_text(item["content"])
    check: list[str | Path] = [tool("shellcheck"), "--severity=style"]
    done = subprocess.run([*check, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong"
    wrong.write_text("#!/bin/bash\nrm -r $1\n")
    assert subprocess.run([*check, wrong], capture_output=True, check=False).returncode == 1


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_systemd_knows_every_word_of_the_units(user_data: str, tmp_path: Path) -> None:
    units = {
        Path(name).name: item["content"] for name, item in files_of(user_data).items() if "/systemd/" in name
    }
    assert "holdfast-keys.timer" in units
    for name, content in units.items():
        # The commands are not on this machine; the bootstrap's test shows that they exist on a node.
        lines = [
            line.split("=", 1)[0] + "=/bin/true" if line.startswith("ExecStart=") else line
            for line in content.splitlines()
        ]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    paths = [tmp_path / name for name in sorted(units)]
    done = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "holdfast" in line]
    assert ours == [], done.stderr
    (tmp_path / "holdfast-keys.service").write_text("[Service]\nExecStart=/bin/true\nRestrat=on-failure\n")
    wrong = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False)
    assert "Restrat" in wrong.stderr


# -- the bootstrap, run --------------------------------------------------------------------------------------------


class Metadata(http.server.BaseHTTPRequestHandler):
    """IMDSv2 as far as the bootstrap needs it: a token by PUT, the tag by GET with the token."""

    run_id = "one"

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self._answer(200 if known else 400, "token")

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != "token":
            self._answer(401, "")
        elif self.path == "/latest/meta-data/tags/instance/RunId":
            self._answer(200, self.run_id)
        else:
            self._answer(404, "")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def metadata() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


class Machine(NamedTuple):
    """An overlay of this machine with the node's files, in which scripts run and leave their findings."""

    home: Path
    endpoint: str

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run bash in a temporary copy of this machine with its own /etc, /opt and /var."""
        deps = next(path for path in sys.path if path.endswith("site-packages"))
        shared = [str(self.home), deps]
        enter = f"""
            set -eu
            cd {self.home}; mkdir -p space
            mount -t tmpfs space space; mkdir space/upper space/work space/root
            mount -t overlay overlay -o lowerdir=/,upperdir=space/upper,workdir=space/work space/root
            for path in /proc /dev /sys {" ".join(shared)}; do
                mkdir -p "space/root$path"; mount --rbind "$path" "space/root$path"
            done
            cp -r files/. space/root/
            exec chroot space/root /usr/bin/env -i HOME=/root \\
                PATH={self.home}/played:{sys.base_prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
                AWS_EC2_METADATA_SERVICE_ENDPOINT={self.endpoint} PYTHONDONTWRITEBYTECODE=1 \\
                PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_ROOT_USER_ACTION=ignore DEPS={deps} OUT={self.home} \\
                bash -eu {self.home}/script
        """
        (self.home / "script").write_text(script)
        command = ["unshare", "--mount", "bash", "-c", enter]
        return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.fixture
def machine(minimal: dict[str, Rendered], metadata: str, tmp_path: Path) -> Machine:
    files = files_of(node_data(minimal["whole"], "stager"))
    wheel = tmp_path / "holdfast-0.1.0-py3-none-any.whl"
    for name, item in files.items():
        path = tmp_path / "files" / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(item["content"].replace(f'"{PACKAGE}"', f'"{wheel}"'))
        path.chmod(int(item["permissions"], 8))
    played = tmp_path / "played" / "systemctl"
    played.parent.mkdir()
    played.write_text('#!/bin/sh\necho "$*" >>"$OUT/systemctl.log"\n')
    played.chmod(0o755)
    return Machine(tmp_path, metadata)


def build_wheel(path: Path) -> None:
    """This source as a wheel; the dependencies come from the tests' own environment."""
    info = "holdfast-0.1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for package in ("holdfast", "trainer_side", "stager", "flusher", "operator_side"):
            for source in sorted((ROOT / package).rglob("*.py")):
                wheel.write(source, source.relative_to(ROOT))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: holdfast\nVersion: 0.1.0\n")
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        points = (
            "[console_scripts]\nholdfast = holdfast.command.cli:main\n"
            "[holdfast.commands]\nflusher = flusher.command:flusher\n"
        )
        wheel.writestr(f"{info}/entry_points.txt", points)
        wheel.writestr(f"{info}/RECORD", "")


SNAPSHOT = (
    "find /etc/holdfast /etc/passwd /etc/group /etc/fstab /opt/holdfast /var/lib/holdfast"
    " ! -type d -printf '%p %i %T@ %m %u %s\\n' 2>/dev/null | sort"
)


@needs_overlay
def test_the_bootstrap_makes_a_node_and_a_second_run_changes_nothing(machine: Machine) -> None:
    build_wheel(machine.home / "wheel")
    done = machine.run(f"""
        /usr/local/sbin/holdfast-bootstrap && exit 99   # the package is not there yet
        mv $OUT/wheel $OUT/holdfast-0.1.0-py3-none-any.whl
        /usr/local/sbin/holdfast-bootstrap >$OUT/second
        {SNAPSHOT} >$OUT/before
        /usr/local/sbin/holdfast-bootstrap >$OUT/third
        {SNAPSHOT} >$OUT/after
        cp /etc/holdfast/environment $OUT/environment
        getent passwd holdfast >$OUT/passwd; stat -c '%a %U' /var/lib/holdfast/.ssh >>$OUT/passwd
        PYTHONPATH=$DEPS /opt/holdfast/venv/bin/holdfast flusher --help >$OUT/help
    """)
    assert done.returncode == 0, done.stdout + done.stderr
    home = machine.home
    assert "holdfast-0.1.0-py3-none-any.whl" in done.stderr  # the first run could not install it
    assert (home / "before").read_text() == (home / "after").read_text() != ""
    assert (home / "third").read_text() == "holdfast-bootstrap: this node is ready: role stager\n"
    assert (home / "passwd").read_text() == "holdfast:x:873:873::/var/lib/holdfast:/bin/bash\n700 holdfast\n"
    assert "Write the checkpoints of one run from the ring" in (home / "help").read_text()
    assert dict(line.split("=", 1) for line in (home / "environment").read_text().split()) == {
        "HOLDFAST_STORE": "s3://holdfast-gpt-123456789012-eu-central-1/gpt/one/checkpoints",
        "HOLDFAST_CLUSTER_URL": "s3://holdfast-gpt-123456789012-eu-central-1/gpt/one/cluster",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "HOLDFAST_RING_BYTES": "8GiB",
    }
    once = [
        "daemon-reload",
        "enable --quiet --now holdfast-keys.timer",
        "enable --quiet --now holdfast-flusher.service",
    ]
    assert (home / "systemctl.log").read_text().splitlines() == 2 * once


@needs_overlay
@pytest.mark.parametrize("run_id", ["../two", "a;reboot", ""])
def test_a_tag_that_leaves_the_runs_prefix_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    monkeypatch.setattr(Metadata, "run_id", run_id)
    done = machine.run("/usr/local/sbin/holdfast-bootstrap; echo not here")
    assert done.returncode == 1
    assert "not here" not in done.stdout
    assert f'the tag RunId is "{run_id}": expected letters, digits, dots, dashes' in done.stderr
    assert not (machine.home / "systemctl.log").exists()


# -- the stager's key, under way -----------------------------------------------------------------------------------


@pytest.fixture
def bucket() -> Iterator[dict[str, str]]:
    with running_moto() as endpoint:
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "HOLDFAST_CLUSTER_URL": "s3://runs/gpt/one/cluster",
            "PATH": os.environ["PATH"],
        }
        import boto3

        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="testing",
                     aws_secret_access_key="testing").create_bucket(Bucket="runs")  # fmt: skip
        yield environment


def keys(role: str, home: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (home / ".ssh").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(KEYS), role]
    return subprocess.run(
        command, env={**environment, "HOME": str(home)}, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not on this machine")
def test_a_trainer_takes_over_the_stagers_key_and_that_of_its_successor(
    bucket: dict[str, str], tmp_path: Path
) -> None:
    trainer = tmp_path / "trainer"
    accepted = trainer / ".ssh" / "authorized_keys"
    assert keys("train", trainer, bucket).returncode == 0
    assert not accepted.exists()
    for stager in (tmp_path / "stager", tmp_path / "successor"):
        for _minute in range(2):
            assert keys("stager", stager, bucket).returncode == 0
            assert keys("train", trainer, bucket).returncode == 0
        assert accepted.read_bytes() == (stager / ".ssh" / "id_ed25519.pub").read_bytes()
        assert accepted.stat().st_mode & 0o777 == 0o600
    before = accepted.stat()
    keys("train", trainer, bucket)
    assert (accepted.stat().st_ino, accepted.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    "content", [b"", b"ssh-rsa AAAA me\n", b'command="reboot" ssh-ed25519 ' + b"A" * 68 + b" x\n"]
)
def test_an_object_that_is_not_one_plain_key_is_not_taken_over(
    bucket: dict[str, str], tmp_path: Path, content: bytes
) -> None:
    import boto3

    client: Any = boto3.client("s3", endpoint_url=bucket["AWS_ENDPOINT_URL"], region_name="us-east-1",
                               aws_access_key_id="testing", aws_secret_access_key="testing")  # fmt: skip
    client.put_object(Bucket="runs", Key="gpt/one/cluster/stager.pub", Body=content)
    done = keys("train", tmp_path, bucket)
    assert done.returncode == 1
    assert "expected one ssh-ed25519 public key" in done.stderr
    assert not (tmp_path / ".ssh" / "authorized_keys").exists()


def test_settings_reach_the_node_as_they_were_given(minimal: dict[str, Rendered]) -> None:
    files = files_of(node_data(minimal["whole"], "stager"))
    env = dict(line.split("=", 1) for line in files["/etc/holdfast/node.env"]["content"].splitlines())
    assert json.loads(env["HOLDFAST_PACKAGE"]) == PACKAGE
    assert json.loads(env["HOLDFAST_UNITS"]) == "holdfast-keys.timer holdfast-flusher.service"
