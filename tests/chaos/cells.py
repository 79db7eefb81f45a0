"""The kill matrix as data: every stage of a checkpoint's life, every set of victims, and how each cell is run.

    stage     a point that a process reaches (holdfast/faultpoint.py), in the second of three checkpoints
    victims   processes that get SIGKILL there; if others than the reacher, SIGSTOP holds the reacher until they are
    dead cell      a stage, its victims, with or without ULFM, on a directory or on S3, relaunched here or elsewhere,
    with a
              state that each rank holds or one that FSDP2 has split, over MPI or over TCP

Four parts have stages of their own: ranks that read the stager's ring themselves, in a job after one that was killed
at once (`READING_CELLS`), a ring that grows for the first checkpoint (`GROWTH_CELLS`), a store that refuses every
checkpoint until the victims are dead (`OUTAGE_CELLS`), and a checkpoint without its proof (`PROOF_CELLS`).

`make chaos` runs every cell. `MOMENTS` are further points, at which the reacher alone, or all processes, are killed.
`make check` runs the `regular` cells: one for each set of victims, a flusher that is killed again in recovery, a torn
copy, and a doubt on its way; of split state a kill of a rank, of the stager and of the flusher; over TCP of a rank and
of the stager; and of the flusher while a rank reads the ring, while it grows, and while the store refuses.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.faultpoint import Point

__all__ = [
    "CELLS",
    "DOUBT_CELLS",
    "EVERY",
    "EVERYBODY",
    "GROWTH_CELLS",
    "MOMENTS",
    "OUTAGE_CELLS",
    "PROOF_CELLS",
    "RANKS",
    "READING_CELLS",
    "SAVES",
    "SPLIT_CELLS",
    "STAGES",
    "STEPS",
    "TCP_CELLS",
    "TORN_CELLS",
    "VICTIMS",
    "Cell",
    "Stage",
    "Victims",
]

RANKS = 2
STEPS, EVERY = 11, 3
SAVES = (2, 5, 8)  # two steps are left after the last one: a relaunch always has something to train


class Stage(NamedTuple):
    """One row.

    Attributes:
        name: In the table.
        where: The process that reaches the point, and the point: `flusher@part_written`.
        number: Which time, from 1. `number_s3`: the same moment on S3, where images and parts are larger.
            `number_split`: the same moment where both ranks send into each chunk; 0: no other.
        staged: How many saves are recorded as staged when the point is reached: they must not be lost.
        staged_max: Upper bound for the staged saves: a kill that comes later proves something else.
        durable: How many have their manifest in the store then: they must survive the loss of the machine too.
        keep_last: The setting; 0 keeps all.
        seeded: How many saves an earlier job has left in the store.
        then: Another fault, for the successor of a dead process.
        ring: Size of the ring, if not the place's own.
        torn: Whether rank 0 finds its copy of the second checkpoint torn when the point is reached.
        doubted: Whether rank 0 has published the second checkpoint torn, and a comparison has shown it.
        ring_left: Whether an earlier job was killed at once when its second checkpoint was staged, and left its ring.
        grows: Whether the ring has its default size, and grows for the first checkpoint.
        refused: Whether the store has no room for a checkpoint before the victims are dead.
        gone: How many staged saves have been dropped from the ring for newer ones when the point is reached.
    """

    name: str
    where: str
    number: int = 2
    number_s3: int = 2
    number_split: int = 0
    staged: int = 2
    staged_max: int = 3
    durable: int = 0
    keep_last: int = 0
    seeded: int = 0
    then: str = ""
    ring: str = ""
    torn: bool = False
    doubted: bool = False
    ring_left: bool = False
    grows: bool = False
    refused: bool = False
    gone: int = 0

    @property
    def reacher(self) -> str:
        """The process that reaches the point."""
        return self.where.partition("@")[0]

    @property
    def point(self) -> Point:
        """The point that is reached."""
        return Point(self.where.partition("@")[2])


class Victims(NamedTuple):
    """One column. `machine`: the memory is lost too. Without processes the reacher just freezes for a while."""

    name: str
    processes: tuple[str, ...]
    machine: bool = False


_ALL_RANKS = tuple(f"rank:{rank}" for rank in range(RANKS))
EVERYBODY = ("mpirun", *_ALL_RANKS, "stager", "flusher")
_MID_IMAGE, _MID_IMAGE_S3 = 34, 5  # the second of 23 parts each; and of 3

STAGES = (
    Stage("before the offer", "rank:1@save_begun", staged=1, staged_max=1),
    Stage("mid-copy", "rank:1@tensor_copied", 40, 31, staged=1, staged_max=1),
    Stage("mid-chunk", "rank:1@frame_sent", 17, 8, number_split=24, staged=1, staged_max=1),
    Stage("sealed, not staged", "stager@sealed", staged=1, staged_max=1),
    Stage("staged", "stager@staged"),
    Stage("mid-part", "flusher@part_written", _MID_IMAGE, _MID_IMAGE_S3, staged=1),
    Stage("all parts written", "flusher@parts_done"),
    Stage("between file and manifest", "flusher@file_published"),
    Stage("mid-verify", "flusher@verifying", 40, 24, durable=1),
    Stage("mid-retention", "flusher@manifest_deleted", 1, 1, durable=2, keep_last=1),
    Stage("mid-restore", "rank:1@restore_read", 1, 1, durable=2, seeded=2),
)

VICTIMS = (
    Victims("a rank", ("rank:1",)),
    Victims("all ranks", _ALL_RANKS),
    Victims("mpirun", ("mpirun",)),
    Victims("stager", ("stager",)),
    Victims("flusher", ("flusher",)),
    Victims("stager and flusher", ("stager", "flusher")),
    Victims("everything", EVERYBODY),
    Victims("the machine", EVERYBODY, machine=True),
)

MOMENTS = (
    Stage("slice sent", "rank:1@slice_sent", staged=1, staged_max=1),
    Stage("chunk received", "stager@chunk_received", 34, 18, staged=1, staged_max=1),
    Stage("chunk full", "stager@chunk_full", 34, 18, staged=1, staged_max=1),
    Stage("staged, and heard", "flusher@staged_heard"),
    Stage("part begun", "flusher@part_begun", _MID_IMAGE, _MID_IMAGE_S3, staged=1),
    Stage("file named", "flusher@file_named"),
    Stage("manifest written", "flusher@manifest_written", durable=2),
    Stage("room of an old one kept", "flusher@file_retired", 1, 1, durable=2, keep_last=1),
    Stage(
        "killed again in recovery",
        "flusher@part_written",
        _MID_IMAGE,
        _MID_IMAGE_S3,
        staged=1,
        then="flusher@recovering=kill",
    ),
    Stage("mid-part, ring smaller than image", "flusher@part_written", _MID_IMAGE, staged=1, ring="1MiB"),
)

# Rank 1 has sent its slice, and ends; the copy of rank 0 is torn.
TORN = Stage("torn on another rank", "rank:1@slice_sent", staged=1, staged_max=1, torn=True)
_BY_NAME = {victims.name: victims for victims in VICTIMS}
_OF_REACHER = {"rank:1": "a rank", "stager": "stager", "flusher": "flusher"}
_DEPENDS_ON_ULFM = ("a rank", "all ranks", "mpirun", "stager")
_REGULAR = frozenset(
    {
        "before the offer x a rank",
        "mid-copy x all ranks",
        "mid-chunk x mpirun (without ULFM)",
        "sealed, not staged x stager",
        "mid-part x stager and flusher (S3)",
        "all parts written x everything",
        "between file and manifest x the machine",
        "mid-retention x flusher",
        "killed again in recovery x flusher",
        "mid-chunk x a rank (split)",
        "chunk received x stager (split)",
        "mid-part x flusher (split)",
        "mid-chunk x a rank (TCP)",
        "chunk received x stager (TCP)",
        "torn on another rank x a rank",
        "doubt heard x a rank",
        "doubt written x everything",
        "a rank reads the ring x flusher",
        "slots in the journal x flusher",
        "staged, and the store refuses x stager and flusher",
        "an older one makes room x flusher",
    }
)
_ON_S3 = (
    ("mid-chunk", "a rank"),
    ("staged", "everything"),
    ("mid-part", "all ranks"),
    ("mid-part", "flusher"),
    ("mid-part", "stager and flusher"),
    ("mid-part", "everything"),
    ("mid-part", "the machine"),
    ("all parts written", "flusher"),
    ("between file and manifest", "flusher"),
    ("mid-verify", "flusher"),
    ("mid-retention", "flusher"),
    ("mid-restore", "all ranks"),
)
_ELSEWHERE = (
    ("mid-chunk", "all ranks"),
    ("staged", "mpirun"),
    ("mid-part", "stager"),
    ("between file and manifest", "all ranks"),
)


class Cell(NamedTuple):
    """One run of the matrix."""

    stage: Stage
    victims: Victims
    ulfm: bool = True
    store: str = "directory"
    elsewhere: bool = False
    split: bool = False
    tcp: bool = False

    @property
    def regular(self) -> bool:
        """Whether `make check` runs it."""
        return self.name in _REGULAR

    @property
    def how(self) -> str:
        """Variant of the cell, to tell it from other runs of the same stage and victims."""
        return ", ".join(
            word
            for word, said in (
                ("S3", self.store == "s3"),
                ("without ULFM", not self.ulfm),
                ("elsewhere", self.elsewhere),
                ("split", self.split),
                ("TCP", self.tcp),
            )
            if said
        )

    @property
    def name(self) -> str:
        """Name for test ids and results."""
        how = f" ({self.how})" if self.how else ""
        return f"{self.stage.name} x {self.victims.name}{how}"


def _cells() -> tuple[Cell, ...]:
    by_name = {stage.name: stage for stage in STAGES}
    found: list[Cell] = []
    for stage in STAGES:
        found += [Cell(stage, victims) for victims in VICTIMS]
        found += [Cell(stage, _BY_NAME[name], ulfm=False) for name in _DEPENDS_ON_ULFM]
    for moment in MOMENTS:
        found.append(Cell(moment, _BY_NAME[_OF_REACHER[moment.reacher]]))
        found.append(Cell(moment, _BY_NAME["everything"]))
    found += [Cell(by_name[stage], _BY_NAME[victims], store="s3") for stage, victims in _ON_S3]
    found += [Cell(by_name[stage], _BY_NAME[victims], elsewhere=True) for stage, victims in _ELSEWHERE]
    return tuple(found)


CELLS = _cells()
_SPLIT = (
    ("before the offer", "a rank"),
    ("mid-copy", "a rank"),
    ("mid-chunk", "a rank"),
    ("mid-chunk", "all ranks"),
    ("mid-chunk", "stager"),
    ("mid-chunk", "flusher"),
    ("mid-chunk", "everything"),
    ("slice sent", "a rank"),
    ("chunk received", "stager"),
    ("chunk full", "stager"),
    ("sealed, not staged", "a rank"),
    ("sealed, not staged", "stager"),
    ("staged", "all ranks"),
    ("staged", "stager"),
    ("mid-part", "a rank"),
    ("mid-part", "flusher"),
    ("mid-part", "stager and flusher"),
    ("killed again in recovery", "flusher"),
    ("all parts written", "flusher"),
    ("between file and manifest", "flusher"),
    ("between file and manifest", "the machine"),
    ("mid-verify", "flusher"),
    ("mid-retention", "flusher"),
    ("mid-restore", "a rank"),
    ("mid-restore", "all ranks"),
)
_STAGES_BY_NAME = {stage.name: stage for stage in (*STAGES, *MOMENTS)}
SPLIT_CELLS = tuple(Cell(_STAGES_BY_NAME[stage], _BY_NAME[victims], split=True) for stage, victims in _SPLIT)
_OVER_TCP = (
    ("before the offer", "a rank"),
    ("mid-copy", "a rank"),
    ("mid-chunk", "a rank"),
    ("mid-chunk", "all ranks"),
    ("mid-chunk", "stager"),
    ("mid-chunk", "flusher"),
    ("mid-chunk", "everything"),
    ("slice sent", "a rank"),
    ("chunk received", "stager"),
    ("chunk full", "stager"),
    ("sealed, not staged", "a rank"),
    ("sealed, not staged", "stager"),
    ("staged", "all ranks"),
    ("staged", "stager"),
    ("mid-part", "a rank"),
    ("mid-part", "flusher"),
    ("mid-part", "stager and flusher"),
    ("mid-part", "everything"),
    ("all parts written", "flusher"),
    ("between file and manifest", "the machine"),
    ("mid-restore", "a rank"),
    ("mid-restore", "all ranks"),
)
TCP_CELLS = tuple(Cell(_STAGES_BY_NAME[stage], _BY_NAME[victims], tcp=True) for stage, victims in _OVER_TCP)
_READING = Stage("a rank reads the ring", "rank:1@ring_seen", 20, staged_max=2, ring_left=True)
READING_CELLS = (
    *(Cell(_READING, _BY_NAME[name]) for name in ("a rank", "stager", "flusher", "stager and flusher")),
    *(Cell(_READING, _BY_NAME[name], tcp=True) for name in ("a rank", "stager", "flusher")),
)
_NOBODY = Victims("nobody: it stands still", ())
_TAKEN, _ADDED, _HEARD = (
    Stage(name, where, 1, staged=0, staged_max=1, grows=True)
    for name, where in (
        ("memory taken", "flusher@ring_taken"),
        ("slots in the journal", "flusher@ring_added"),
        ("stager told", "stager@growth_heard"),
    )
)
GROWTH_CELLS = (
    Cell(_TAKEN, _BY_NAME["flusher"]),
    Cell(_TAKEN, _NOBODY),
    Cell(_ADDED, _BY_NAME["flusher"]),
    Cell(_ADDED, _BY_NAME["stager"]),
    Cell(_ADDED, _BY_NAME["everything"]),
    Cell(_HEARD, _BY_NAME["a rank"]),
    Cell(_HEARD, _NOBODY),
    Cell(_ADDED, _BY_NAME["flusher"], tcp=True),
    Cell(_HEARD, _BY_NAME["stager"], tcp=True),
)
_DOUBT_HEARD, _DOUBT_WRITTEN, _DOUBT_MARKED = (
    Stage(name, where, 1, doubted=True)
    for name, where in (
        ("doubt heard", "stager@doubt_heard"),
        ("doubt written", "stager@doubt_written"),
        ("doubt marked", "flusher@doubt_marked"),
    )
)
# No kill of the stager right after it receives a doubt: the doubt is lost (docs/design/006-torn-copies-withdrawn.md).
DOUBT_CELLS = (
    *(Cell(_DOUBT_HEARD, _BY_NAME[name]) for name in ("a rank", "all ranks", "flusher")),
    *(Cell(_DOUBT_WRITTEN, victims) for victims in VICTIMS if not victims.machine),
    *(
        Cell(_DOUBT_MARKED, _BY_NAME[name])
        for name in ("a rank", "flusher", "stager and flusher", "everything")
    ),
    Cell(_DOUBT_MARKED, _NOBODY),
    Cell(_DOUBT_WRITTEN, _BY_NAME["stager"], tcp=True),
)
# The manifest of the second checkpoint is published; the digests of the step after it are not.
_PROOF_HEARD = Stage("published, not proven", "flusher@proof_heard", durable=2)
PROOF_CELLS = (Cell(_PROOF_HEARD, _BY_NAME["flusher"]), Cell(_PROOF_HEARD, _BY_NAME["everything"]))
TORN_CELLS = (Cell(TORN, _BY_NAME["a rank"]), Cell(TORN, _BY_NAME["everything"]))
_REFUSED = Stage("staged, and the store refuses", "stager@staged", 2, staged=2, staged_max=2, refused=True)
_MAKES_ROOM = Stage(
    "an older one makes room", "flusher@superseded", 1, staged=2, staged_max=2, refused=True, gone=1
)
OUTAGE_CELLS = (
    *(
        Cell(_REFUSED, _BY_NAME[name])
        for name in ("all ranks", "mpirun", "stager", "flusher", "stager and flusher", "everything")
    ),
    *(
        Cell(_MAKES_ROOM, _BY_NAME[name])
        for name in ("all ranks", "stager", "flusher", "stager and flusher", "everything")
    ),
    Cell(_REFUSED, _BY_NAME["all ranks"], tcp=True),
    Cell(_REFUSED, _BY_NAME["stager"], tcp=True),
)
