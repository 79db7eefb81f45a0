"""Compares the checkpoints of two runs step by step, and names the values that differ.

Tensors are compared by the CRCs in the manifests, so nothing large is read. Only differing `PerRank` values and plain
values are read, to name the difference. Times measured by a clock do not count as differences:

    trainer/json/log_history/5/eval_runtime             measured
    trainer/json/log_history/5/eval_samples_per_second  measured
    trainer/json/log_history/5/eval_loss                not
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from holdfast.checkpoints.catalog import Catalog
from holdfast.image.manifest import EntryRecord, Manifest, TensorRecord
from holdfast.store.base import Store
from operator_side.drill.values import read_per_rank_values, read_values

_PICKLE = "data.pkl"
_SHOWN_CHARACTERS = 60
_CRC = "CRC "
_NUMBER = re.compile(r"(?<=/)\d+(?=/)")  # the index of a log entry
# Only values in logs are judged by their names: `time` in another part of the state may be training data.
_LOGS = re.compile(
    r"logs?|logged|logger|history|histories|metrics|perf(ormance)?|timers?|timings?|throughput|speed"
)
_TIMES = re.compile(
    r"times?|runtime|walltime|wallclock|clock|date|datetime|timestamps?|sec(ond)?s?|s|[mu]s|msec|minutes|hours|elapsed|"
    r"durations?|latency|eta|throughput|speed|mfu|tflops|[stfq]ps"
)
_COUNTED = re.compile(r"time_?steps?")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# In Trainer's entries: means over the steps since the last entry, or since the process began. A neighbour in the same
# entry identifies each.
_OF_THE_PROCESS = {"train_loss": "train_runtime", "loss": "grad_norm"}


class Difference(NamedTuple):
    """A differing value: its name, and the two values (for a tensor, the CRC-32)."""

    path: str
    was: str
    became: str
    is_measured: bool = False  # by a clock, so it differs between any two runs

    def __str__(self) -> str:
        is_short = max(len(self.was), len(self.became)) <= _SHOWN_CHARACTERS
        if is_short and _CRC not in self.was + self.became:
            return f"{self.path}: {self.was} became {self.became}"
        return f"{self.path}: its bytes differ"


class FileComparison(NamedTuple):
    """Comparison of a file with the reference's file of the same step. `measured`: names that do not count."""

    step: int
    attempt: int
    file: str
    differs: tuple[Difference, ...]
    measured: frozenset[str] = frozenset()


def constants(files: Sequence[FileComparison], before_step: int) -> set[str]:
    """Return names of values that never change within a run but differ between the runs, such as a start time or an
    unseeded value: fine unless a kill changed them. `before_step`: step of the first kill; no file up to it, no names.
    """
    if not any(one.step <= before_step for one in files):
        return set()
    seen: dict[str, list[Difference]] = {}
    for one in files:
        for each in one.differs:
            seen.setdefault(each.path, []).append(each)
    return {path for path, all_ in seen.items() if len(all_) == len(files) and len(set(all_)) == 1}


def compare(reference: Store, drilled: Store) -> list[FileComparison]:
    """Compare every file whose step both runs have, in order. Raises `DamageError`: a file is unreadable."""
    expected = {item.step: item.manifest for item in Catalog(reference).list() if item.manifest is not None}
    found = []
    for item in Catalog(drilled).list():
        want, got = expected.get(item.step), item.manifest
        if want is None:
            continue
        if got is None or item.fault:
            fault = Difference(item.name, "good", item.fault)
            found.append(FileComparison(item.step, 0, item.name, (fault,)))
            continue
        all_ = list(differences(reference, want, drilled, got))
        measured = frozenset(_NUMBER.sub("*", each.path) for each in all_ if each.is_measured)
        differs = tuple(each for each in all_ if not each.is_measured)
        found.append(FileComparison(item.step, got.attempt, got.file, differs, measured))
    return sorted(found, key=lambda one: (one.step, one.attempt))


def differences(first: Store, want: Manifest, second: Store, got: Manifest) -> Iterator[Difference]:
    ours, theirs = ({tensor.path: tensor for tensor in one.tensors} for one in (want, got))
    for path in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(path), theirs.get(path)
        if one is None or other is None:
            was, became = ("nothing" if tensor is None else "a tensor" for tensor in (one, other))
            yield Difference(path, was, became)
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            was, became = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (one, other))
            yield Difference(path, was, became)
        elif _size_and_crc(want, one) != _size_and_crc(got, other):
            yield from _tensor_differences(path, first, want, one, second, got, other)
    pickles = _pickle(want), _pickle(got)
    if pickles[0].crc32 != pickles[1].crc32:
        before = read_values(_read(first, want, pickles[0]), source=want.file)
        after = read_values(_read(second, got, pickles[1]), source=got.file)
        yield from _value_differences("", before, after)


def _tensor_differences(
    path: str,
    first: Store,
    want: Manifest,
    one: TensorRecord,
    second: Store,
    got: Manifest,
    other: TensorRecord,
) -> Iterator[Difference]:
    if "uint8" in one.dtype and len(one.shape) == 1:  # perhaps a `PerRank` value
        was = read_per_rank_values(_read(first, want, want.entries[one.entry]))
        became = read_per_rank_values(_read(second, got, got.entries[other.entry]))
        if was is not None and became is not None:  # equal values in different bytes are the same state
            yield from _value_differences(f"{path}/", was, became)
            return
    yield Difference(path, f"{_CRC}{_size_and_crc(want, one)[1]}", f"{_CRC}{_size_and_crc(got, other)[1]}")


def _value_differences(prefix: str, want: dict[str, str], got: dict[str, str]) -> Iterator[Difference]:
    paths = dict.fromkeys(f"{prefix}{path}" for path in (*want, *got))
    for path in paths:
        was, became = (values.get(path.removeprefix(prefix), "nothing") for values in (want, got))
        if was != became:
            yield Difference(path, was, became, is_measured(path, paths))


def _size_and_crc(manifest: Manifest, tensor: TensorRecord) -> tuple[int, int]:
    entry = manifest.entries[tensor.entry]
    return entry.nbytes, entry.crc32


def _pickle(manifest: Manifest) -> EntryRecord:
    return next(entry for entry in manifest.entries if entry.name.rpartition("/")[2] == _PICKLE)


def _read(store: Store, manifest: Manifest, entry: EntryRecord) -> bytes:
    data = bytearray(entry.nbytes)
    store.read_into(manifest.file, entry.offset, memoryview(data))
    return bytes(data)


def is_measured(path: str, siblings: Collection[str]) -> bool:
    """Whether the value is in a log, and is a time, a speed or a mean since the process began."""
    place, _, name = path.rpartition("/")
    if name == "elapsed" or "time_elapsed" in path.split("/"):  # Lightning's Timer
        return True
    if not _any_word(place, _LOGS):
        return False
    if name in _OF_THE_PROCESS:
        return f"{place}/{_OF_THE_PROCESS[name]}" in siblings
    return _any_word(name, _TIMES) and not _COUNTED.search(name.lower())


def _any_word(text: str, kind: re.Pattern[str]) -> bool:
    return any(kind.fullmatch(word.lower()) for word in _WORDS.findall(text))
