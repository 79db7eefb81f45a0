"""The trainers' part of `holdfast doctor`: torch, its devices, memory that a device copies into, notices, tiers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import torch

from holdfast.command.checks import CheckPlan, CheckState, Finding
from holdfast.config import TrainerConfig
from holdfast.store.file_system import file_system_of
from trainer_side.notice.aws import Aws
from trainer_side.notice.azure import Azure
from trainer_side.notice.gcp import Gcp
from trainer_side.notice.watch import NoticeSource, SourceError
from trainer_side.save.host_memory import lock
from trainer_side.tiers.first_touch import huge_buffer
from trainer_side.tiers.open_tiers import memory_directory
from trainer_side.tiers.tier_directory import not_in_memory_reason, small_pages_reason

_SECONDS_MAX = 1.0  # the server is on this machine, or next to it
_CHECK = "metadata service"


def metadata(_: CheckPlan, environ: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Check which cloud's metadata server answers, and whether it gives notices, within a few seconds."""
    environ = os.environ if environ is None else environ
    try:
        aws = Aws(environ, seconds_max=_SECONDS_MAX)
        others = (Gcp(environ, seconds_max=_SECONDS_MAX), Azure(environ, seconds_max=_SECONDS_MAX))
    except SourceError as error:
        yield Finding(_CHECK, CheckState.FAIL, str(error), "fix or unset the variable that moves the server")
        return
    if aws.is_present():
        yield _notice_finding(aws)
    elif aws.answers_without_token():
        yield Finding(
            _CHECK,
            CheckState.WARN,
            "AWS answers, but gives no session token: the job will receive neither interruption notices nor the "
            "credentials of the instance's role",
            "in a container the hop limit must be 2 (imds_hop_limit of infra/modules; `aws ec2 "
            "modify-instance-metadata-options --http-put-response-hop-limit 2`); elsewhere see whether a firewall "
            "lets PUT through to 169.254.169.254",
        )
    else:
        found = next((source for source in others if source.is_present()), None)
        if found is not None:
            yield _notice_finding(found)
        else:
            yield Finding(
                _CHECK,
                CheckState.SKIPPED,
                "no metadata server of AWS, Google Cloud or Azure answers: this is no machine of theirs, or it is "
                "switched off",
                "fine there; where machines are taken away otherwise, watch a signal (`watch = sigterm`)",
            )


def _notice_finding(source: NoticeSource) -> Finding:
    try:
        notices = source.poll()
    except SourceError as error:
        return Finding(
            _CHECK, CheckState.WARN, f"{source.name} answers, but not as expected: {error}", "report this"
        )
    if notices:
        return Finding(
            _CHECK,
            CheckState.WARN,
            f"{source.name} answers, and has a notice for this machine: {notices[0].said_by}",
            "take another machine: this one is about to go",
        )
    return Finding(_CHECK, CheckState.OK, f"{source.name} answers, and has no notice for this machine")


_PINNED_BYTES = 64 << 20


def trainer(plan: CheckPlan) -> Iterator[Finding]:
    """Run all checks of a training rank's machine."""
    yield from devices(plan)
    yield from metadata(plan)
    yield from tiers(plan)


def devices(_: CheckPlan) -> Iterator[Finding]:
    """Report the version of torch, the devices it sees, and whether host memory can be pinned for them."""
    yield Finding("torch", CheckState.OK, f"torch {torch.__version__}")
    if not torch.cuda.is_available():
        wanted = torch.version.cuda is not None
        yield Finding(
            "gpu",
            CheckState.WARN if wanted else CheckState.SKIPPED,
            "torch sees no CUDA device" if wanted else "this torch is built for CPUs",
            "look at nvidia-smi and the driver" if wanted else "",
        )
        return
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding(
            f"gpu {index}", CheckState.OK, f"{name}, {free_bytes >> 20:,} of {total_bytes >> 20:,} MiB free"
        )
    if (problem := lock(huge_buffer(_PINNED_BYTES))) is not None:
        yield Finding(
            "pinned memory",
            CheckState.FAIL,
            f"cannot lock {_PINNED_BYTES >> 20} MiB: {problem}",
            "do what the message says; without it each copy from the device blocks the CPU",
        )
    else:
        yield Finding("pinned memory", CheckState.OK, f"{_PINNED_BYTES >> 20} MiB locked")


def tiers(_: CheckPlan) -> Iterator[Finding]:
    """Check whether each configured memory tier lies in memory, where a device can copy into it."""
    for spec in TrainerConfig.from_sources().tiers:
        if (directory := memory_directory(spec)) is None:
            continue
        problem, needs_it = not_in_memory_reason(spec, directory), torch.cuda.is_available()
        yield Finding(
            "memory tier",
            CheckState.OK if problem is None else CheckState.FAIL if needs_it else CheckState.WARN,
            f"{directory} is on {file_system_of(directory)}",
            problem or "",
        )
        if (small := small_pages_reason(directory)) is not None:
            why, command = small
            yield Finding(
                "memory tier pages",
                CheckState.WARN if needs_it else CheckState.OK,
                f"slots get small pages: {why}",
                f"as root: {command}; first use of the slots is then about 2.5 times as fast",
            )
