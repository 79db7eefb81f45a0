"""The live page and the report in a real browser: no page is wider than a phone, every chart is drawn."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from operator_side.live.live_page import live_page
from tests.unit.operator_side.live.test_live_page import run
from tests.unit.operator_side.report.logs import EVENTS, STATUS, facts_of, page_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE, DESKTOP = 390, 1440
_FRAMES = """<!DOCTYPE html><title>frames</title><pre></pre><script>
const frames = %s;
const found = {};
for (const [name, width] of frames) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 900; frame.src = name;
  frame.onload = () => setTimeout(() => {
    const page = frame.contentDocument, root = page.documentElement;
    const pixels = (one) => one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
    found[name + " " + width] = {
      beyond: root.scrollWidth - root.clientWidth,
      charts: page.querySelectorAll("canvas").length,
      drawn: [...page.querySelectorAll("canvas")].filter((one) => pixels(one).some(Boolean)).length,
    };
    if (Object.keys(found).length === frames.length) document.querySelector("pre").textContent = JSON.stringify(found);
  }, 200);
  document.body.append(frame);
}
</script>"""


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


def test_pages_fit_a_phone_and_draw_every_chart(tmp_path: Path) -> None:
    facts = facts_of(STATUS, EVENTS, price=12.4)
    pages = {"report.html": page_of(facts).encode()}
    for ranks in (2, 64):
        long = f"{'x' * 80} " * 3
        pages[f"live-{ranks}.html"] = live_page(run(ranks, "h" * 60, long), facts, every_seconds=3600.0)
    for name, body in pages.items():
        (tmp_path / name).write_bytes(body)
    frames = [(name, width) for name in pages for width in (PHONE, DESKTOP)]
    (tmp_path / "frames.html").write_text(_FRAMES % json.dumps(frames))
    dom, said = _opened(tmp_path / "frames.html", tmp_path / "profile")
    assert not re.findall(r"CONSOLE.*", said)
    seen = json.loads(html.unescape(dom.partition("<pre>")[2].partition("</pre>")[0]))
    assert len(seen) == len(frames)
    for name, of in seen.items():
        assert of["beyond"] <= 0, f"{name} is broader than its window"
        assert of["drawn"] == of["charts"] > 0, name


def test_a_page_whose_server_is_gone_says_since_when(tmp_path: Path) -> None:
    (tmp_path / "live.html").write_bytes(live_page(run(2), None, every_seconds=0.1))
    dom, _ = _opened(tmp_path / "live.html", tmp_path / "profile")
    (said,) = re.findall(r'<p id="connection" class="panel warning" role="status">([^<]*)</p>', dom)
    assert re.match(r"No answer since \d\d:\d\d:\d\d UTC; the page shows the state of then", said)


def _opened(page: Path, profile: Path) -> tuple[str, str]:
    """The page after its scripts, and what the browser logged."""
    assert CHROMIUM is not None
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
    )
    command = [
        CHROMIUM,
        *options,
        f"--user-data-dir={profile}",
        "--virtual-time-budget=10000",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    return done.stdout, done.stderr
