"""The page as a browser would take it apart: whole, accessible, loads nothing, says nothing that a file made it say."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.telemetry.rows import CheckpointRow
from operator_side.report.page import thinned
from tests.unit.operator_side.report.logs import EVENTS, STATUS, T0, Line, Page, facts_of, page_of, written

_PAGE_BYTES_MAX = 2_000_000
_HOSTILE = (
    "</title></style><script>alert(1)</script><img src=x onerror=y> \"' & \x1b[2J\u202e http://evil.example/x"
)


def real_page() -> Page:
    return Page(page_of(facts_of(STATUS, EVENTS, price=12.4)))


def style_of(text: str) -> str:
    found = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert found is not None
    return found[1]


def test_page_is_whole_and_loads_nothing() -> None:
    text = page_of(facts_of(STATUS, EVENTS))
    found = Page(text)
    assert found.declaration == "DOCTYPE html"
    names = {name for name, _ in found.tags}
    assert not names & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "form",
        "base",
        "image",
        "use",
        "foreignObject",
    }
    for name, attributes in found.tags:
        assert not {"src", "srcset", "action", "style", "background", "xlink:href"} & attributes.keys(), name
        assert not any(key.startswith("on") for key in attributes)
        if "href" in attributes:
            assert (attributes["href"] or "").startswith(("#", "data:")), attributes
    assert not re.search(r"url\(|@import|@font-face", style_of(text))
    assert "http:" not in text
    assert "https:" not in text
    assert "//" not in re.sub(r"s3://bucket/run", "", text)


def test_policy_allows_its_own_style_alone() -> None:
    policy = next(one["content"] for one in real_page().of("meta") if one.get("http-equiv"))
    assert policy is not None
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == "'none'"
    said = base64.b64encode(hashlib.sha256(style_of(page_of(facts_of(STATUS))).encode()).digest()).decode()
    assert parts["style-src"] == f"'sha256-{said}'"


def test_page_is_accessible() -> None:
    found = real_page()
    assert found.of("html")[0]["lang"] == "en"
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for name, attributes in found.tags:
        for key in ("aria-labelledby", "href"):
            for target in (attributes.get(key) or "").split():
                if key == "aria-labelledby" or target.startswith("#"):
                    assert target.removeprefix("#") in ids, (name, target)
    for svg in found.of("svg"):
        assert svg["role"] == "img"
        assert svg["aria-labelledby"]
    assert len(found.of("caption")) == len(found.of("table")), "every table says what it shows"
    assert all(cell["scope"] in {"col", "row"} for cell in found.of("th"))
    assert [name for name, _ in found.tags].count("h1") == 1
    assert any(one.get("name") == "viewport" for one in found.of("meta"))
    assert all(region["tabindex"] == "0" for region in found.of("div") if region.get("role") == "region")


def test_every_section_is_there_and_has_its_figures() -> None:
    found = real_page()
    sections = {one["aria-labelledby"] for one in found.of("section")}
    everything = {
        "timeline",
        "interruptions",
        "goodput",
        "times",
        "ring",
        "troubles",
        "checkpoints",
        "unknown",
    }
    assert sections == everything, "no step was declined in it"
    for words in (
        "host vm had a notice that it will be taken",
        "ended 3.25 s, launched 1.34 s, joined 7.80 s, restored 4.24 s, training 65.0 ms",
        "step 19",
        "work done twice",
        "save() to durable",
        "stall of training (slowest rank)",
        "emergency_staged",
        "Step 4, attempt 1: verified, durable after 0.67 s",
        "How full the ring was, and how large it is, is not in the logs",
        "Points to check",
    ):
        assert words in found.text


def luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_colours_have_enough_contrast(is_dark: bool) -> None:
    light, _, dark = style_of(page_of(facts_of(STATUS))).partition("@media (prefers-color-scheme:dark)")
    colours = dict(re.findall(r"--(\w+):(#\w{6});", dark if is_dark else light))
    for behind in ("paper", "panel"):
        for text in ("ink", "faint", "link"):
            assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
        for part in ("work", "stall", "back", "start"):
            assert contrast(colours[part], colours[behind]) >= 3, (part, behind)


def test_hostile_names_are_texts(tmp_path: Path) -> None:
    lines: list[Line] = [
        (0.0, "stager", "stager_ready", {"attempt": 1, "ranks": 1}),
        (1.0, "trainer", "declined", {"rank": 0, "step": 1, "reason": _HOSTILE, "cause": _HOSTILE}),
        (2.0, "flusher", "bad", {"step": 2, "attempt": 1, "note": _HOSTILE}),
        (3.0, "stager", "rank_lost", {"lost_rank": _HOSTILE, "reason": _HOSTILE}),
        (
            4.0,
            "trainer",
            "save",
            {"rank": 0, "step": 3, "host": _HOSTILE, "saved_at_unix": T0, "save_seconds": 1.0},
        ),
        (5.0, "supervisor", "launched", {"attempt": 1, "hosts": [_HOSTILE, 3], "message": _HOSTILE}),
        (6.0, "supervisor", "training", {"attempt": 1, "seconds": "x", "ended_seconds": [1]}),
        (7.0, "supervisor", "ended", {"attempt": 1, "cause": _HOSTILE, "message": _HOSTILE}),
        (8.0, "supervisor", "over", {"cause": "lost", "message": _HOSTILE}),
    ]
    path = written(tmp_path / "log", lines)
    text = page_of(facts_of(path, run=f"/mnt/{_HOSTILE}"))
    found = Page(text)
    assert not {name for name, _ in found.tags} & {"script", "img"}
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "<script>alert(1)</script>" in found.text, "it is shown as what it is"
    assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)
    assert all((one["href"] or "").startswith(("#", "data:")) for one in [*found.of("a"), *found.of("link")])


def test_half_a_surrogate_pair_is_spelled_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"time":1800000000,"event":"rank_lost","role":"stager","reason":"\\ud800"}\n')
    assert "\\ud800" in page_of(facts_of(path))


def test_words_are_not_broken_in_tables_and_broad_ones_keep_their_width() -> None:
    text = page_of(facts_of(STATUS, EVENTS, price=12.4))
    assert "th,td{overflow-wrap:break-word" in style_of(text), (
        "anywhere would break words into letters on a small screen"
    )
    broad = re.findall(r'<table class="many[^>]*>\s*<caption>([^<]*)', text)
    assert {"Interruptions", "Attempts"} <= set(broad)


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    found = Page(page_of(facts_of(written(tmp_path / "log", []))))
    assert "Nothing is known of this run" in found.text
    assert {one["aria-labelledby"] for one in found.of("section")} == {"unknown"}


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    count, ranks = 10_000, 24
    with path.open("w") as log:

        def say(at: float, role: str, event: str, **fields: Any) -> None:
            log.write(json.dumps({"time": T0 + at, "event": event, "role": role} | fields) + "\n")

        for number in range(1, 51):
            began = (number - 1) * 20_000.0
            say(began, "supervisor", "launched", attempt=number, ranks=ranks, hosts=["h" * 60] * ranks)
            say(began, "stager", "stager_ready", attempt=number)
            say(began, "supervisor", "restored", step=number * 200 - 201, attempt=number)
            say(began + 1, "supervisor", "training", attempt=number, seconds=1.0, joined_seconds=1.0)
            for step in range((number - 1) * 200, number * 200):
                at = began + 10 + 90.0 * (step % 200)
                times = {"saved_at_unix": T0 + at, "cst_seconds": 0.1, "save_seconds": 0.1}
                said = dict.fromkeys(map(str, range(ranks if step % 100 == 99 else 2)), times)
                common = {"step": step, "attempt": number, "image_bytes": 1 << 33}
                say(
                    at + 60,
                    "flusher",
                    "durable",
                    record={"ranks": said},
                    pgt2_seconds=60.0 + step % 7,
                    **common,
                )
                if step % 4:
                    continue
                say(at + 61, "trainer", "declined", rank=0, step=10**6 + step, reason="r" * 900, cause="busy")
                say(
                    at + 62,
                    "stager",
                    "rank_silent",
                    silent_rank=1,
                    name=f"rank 1 at {step} {'n' * 500}",
                    seconds=30.0,
                )
            state = "bad" if number % 2 else "verified"
            say(began + 19_000, "flusher", state, step=number * 200 - 1, attempt=number, note="x" * 900)
            say(began + 19_500, "supervisor", "ended", attempt=number, cause="killed", message="m" * 900)
    facts = facts_of(path)
    assert len(facts.rows) == count
    text = page_of(facts)
    assert len(text.encode()) < _PAGE_BYTES_MAX
    found = Page(text)
    for words in ("of 10,000 checkpoints are shown", "of 2,500 steps are shown", "of 2,525 lines are shown"):
        assert words in found.text
    assert "16 of 24 ranks are shown" in found.text
    assert "2,500 steps came to no checkpoint" in found.text, "what is counted is counted over all"


def test_thinning_keeps_what_stands_out() -> None:
    items = [CheckpointRow(1, step, "bad" if step in {500, 501} else "verified") for step in range(1000)]
    few = [row.step for row in thinned(items, 20)]
    assert len(few) == 20
    assert few == sorted(few)
    assert {0, 500, 501, 999} <= set(few)
    assert max(b - a for a, b in itertools.pairwise(few)) < 100, "spread over all of it"
    bad = [CheckpointRow(1, step, "bad") for step in range(1000)]
    assert [row.step for row in thinned(bad, 5)] == [0, 996, 997, 998, 999]
    assert thinned(range(1000), 1) == [999]
    assert thinned([1, 2], 5) == [1, 2]
