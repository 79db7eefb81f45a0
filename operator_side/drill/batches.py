"""On which batches a resumed run trains, compared with the undisturbed one. Pure.

undisturbed   step 3: a1f0  step 4: 77c2  step 5: 0b9e
resumed after step 3:       step 4: 0b9e                   that is the batch of step 5: one was drawn ahead
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from operator_side.drill.findings import KillFinding, Struck

Lines = Sequence[Mapping[str, Any]]
_AHEAD = (
    "the script draws batches before it saves, and draws others when it resumes. Draw the batch of a step after "
    "the checkpoint of the step before, or save what was drawn"
)
_AGAIN = "the script begins its data again. Save the place in the data, as ResumableSampler does"
_OTHER = "save the place in the data, as ResumableSampler does, and the random numbers that choose samples"


def name_other_batches(
    findings: Sequence[KillFinding], struck: Sequence[Struck], reference: Lines, drilled: Lines
) -> None:
    """Say of each kill whether training has gone on with another batch, from a state that was equal.

    Of later kills nothing can be said, since the state is another one then.

    Args:
        findings: What is known of each kill; its `wrong` gets the sentence as its first.
        struck: The kills, in the same order.
        reference: Diary of the undisturbed run.
        drilled: Diary of the run with kills.
    """
    want = {(line["rank"], line["batches"]["step"]): line["batches"]["crc"] for line in _of(reference)}
    for number, (finding, one) in enumerate(zip(findings, struck, strict=True)):
        if finding.resumed_from is None:
            continue
        until = struck[number + 1].at if number + 1 < len(struck) else float("inf")
        step = finding.resumed_from + 1
        got = {
            line["rank"]: line["batches"]["crc"]
            for line in _of(drilled)
            if one.at <= line["time"] < until and line["batches"]["step"] == step
        }
        differ = [rank for rank, crc in got.items() if want.get((rank, step), crc) != crc]
        if differ:
            finding.wrong.insert(0, _sentence(step, differ, got, want))
        if finding.unequal or differ:
            return


def _sentence(
    step: int, differ: Sequence[int], got: Mapping[int, int], want: Mapping[tuple[int, int], int]
) -> str:
    others = sorted({other for _, other in want if other != step}, key=lambda other: abs(other - step))
    found = next(
        (other for other in others if all(want.get((rank, other)) == got[rank] for rank in differ)), None
    )
    if found is None:
        what, advice = "on a batch that the undisturbed run did not have at any step", _OTHER
    else:
        what = f"on the batch that the undisturbed run had at step {found}"
        advice = _AHEAD if found > step else _AGAIN
    return (
        f"only the batches differ, as far as can be seen: the state it resumed from is equal, but step {step} was "
        f"trained {what}: {advice}"
    )


def _of(diary: Lines) -> Lines:
    return [line for line in diary if "batches" in line]
