"""Compares the batches of two runs: a resumed one with the undisturbed one, or two undisturbed ones. Pure.

undisturbed   step 3: a1f0 02d1  step 4: 77c2 0b9e  step 5: …       a step may take several batches
resumed after step 3:            step 4: 0b9e …     one batch later: drawn before the checkpoint, and lost
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from operator_side.drill.findings import ExecutedKill, KillFinding, Lines

_Batches = Mapping[tuple[int, int], Sequence[int]]  # (rank, step) → CRC of each batch
_REMEDY = (
    "draw through ResumableDraw (docs/data.md), or draw the batch of a step after the checkpoint before it"
)
_IN_HAND = (
    "the script had a batch in hand when it saved, and draws another one when it resumes. After restore(), "
    + _REMEDY
)
_BEFORE = (
    "the script draws its first batch before restore(), and the batch in hand at the checkpoint is lost. After "
    "restore(), " + _REMEDY
)
_TWICE = (
    "the script trains again on the last batch before the checkpoint. ResumableDraw is for a batch that is drawn "
    "ahead; a script that draws none ahead needs the RngState alone"
)
_AGAIN = "the script begins its data again. Save the place in the data, as ResumableSampler does"
_OTHER = (
    "save the place in the data, as ResumableSampler does, and the random numbers that choose samples. If the script "
    "saves them, it had a batch in hand when it saved: after restore(), " + _REMEDY
)


def explain_different_batches(
    findings: Sequence[KillFinding], executed: Sequence[ExecutedKill], reference: Lines, drilled: Lines
) -> None:
    """Add to the `wrong` of a kill if training continued with another batch from an equal state. Later kills cannot be
    judged, because the state then differs. `findings`, `executed`: the kills, in the same order. `reference`,
    `drilled`: the diaries.
    """
    want = _batches(reference)
    for number, (finding, one) in enumerate(zip(findings, executed, strict=True)):
        if finding.resumed_from is None:
            continue
        until = executed[number + 1].killed_at if number + 1 < len(executed) else float("inf")
        step = finding.resumed_from + 1
        got = _batches([line for line in drilled if one.killed_at <= line["time"] < until])
        differ = [
            rank for rank, at in got if at == step and want.get((rank, at), got[rank, at]) != got[rank, at]
        ]
        if differ:
            finding.wrong.insert(0, _sentence(step, differ, got, want))
        if finding.unequal or differ:
            return


def _batches(diary: Lines) -> _Batches:
    return {
        (line["rank"], line["batches"]["step"]): line["batches"]["crcs"]
        for line in diary
        if "batches" in line
    }


def _sentence(step: int, differ: Sequence[int], got: _Batches, want: _Batches) -> str:
    rank = differ[0]
    first = got[rank, step][0]
    calls = [(at, crc) for (of, at), crcs in sorted(want.items()) if of == rank for crc in crcs]
    own = next(place for place, (at, _) in enumerate(calls) if at == step)
    places = sorted((place - own for place, (_, crc) in enumerate(calls) if crc == first), key=abs)
    if not places:
        what, advice = "a batch that the undisturbed run never had", _OTHER
    else:
        away = places[0]
        number = (
            f"{abs(away)} {'batch' if abs(away) == 1 else 'batches'} {'later' if away > 0 else 'earlier'}"
        )
        what = f"the batch that the undisturbed run had {number}, at step {calls[own + away][0]}"
        advice = _IN_HAND if away > 0 else _TWICE if away == -1 and own > 1 else _AGAIN
    if all(want.get((one, step + 1), []) == got.get((one, step + 1)) for one in differ):
        advice = _BEFORE
    return (
        f"only the batches differ, as far as can be seen: the state it resumed from is equal, but step {step} began "
        f"with {what}: {advice}"
    )


# -- two undisturbed runs that differ ----------------------------------------------------------------------------------

_DATA = (
    "seed the data: a ResumableSampler has a seed of its own, and DataLoader(shuffle=True) takes "
    "generator=torch.Generator().manual_seed(1)"
)
_MODEL = (
    "call torch.manual_seed(1) before the model is made (Lightning: seed_everything(1, workers=True), Transformers: "
    "set_seed(1))"
)
_KERNELS = "torch.use_deterministic_algorithms(True) finds operations that are not deterministic"
_PAGE = "docs/drill.md#a-script-that-is-not-deterministic"


def advice_on_seeding(reference: Lines, drilled: Lines) -> str:
    """Return a sentence that names the calls which would make the two runs equal before any kill."""
    want, got = _first_batches(reference), _first_batches(drilled)
    ranks = want.keys() & got.keys()
    differ = sorted(rank for rank in ranks if want[rank] != got[rank])
    if differ:
        return f"The batches of rank {differ[0]} differ already at its first step: {_DATA} ({_PAGE})"
    if ranks:
        return f"The batches of the first step are equal: {_MODEL}; {_KERNELS} ({_PAGE})"
    return f"In the script, {_MODEL}, and {_DATA}; {_KERNELS} ({_PAGE})"


def _first_batches(diary: Lines) -> dict[int, tuple[int, Sequence[int]]]:
    """Return for each rank its first step and the CRC of each of its batches."""
    found: dict[int, tuple[int, Sequence[int]]] = {}
    for line in diary:
        if "batches" in line:
            found.setdefault(int(line["rank"]), (line["batches"]["step"], line["batches"]["crcs"]))
    return found
