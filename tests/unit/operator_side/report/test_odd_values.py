"""Real log lines with many wrong values: every log gives a page."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.support.seeds import each_seed
from tests.unit.operator_side.page.reading import Page
from tests.unit.operator_side.report.logs import EVENTS, STATUS, facts_of, page_of

_ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2**62, 10**400, -0.0, 1e-320, 1e14, 1e308, float("inf"), float("nan"), 1.8e9),
    *("", "x" * 3000, "\ud800", "\u202e", "0", [], {}, [[1]], {"0": {"cst_seconds": "x"}}, {"ranks": [1]}),
    {"ranks": {"0": {"saved_at_unix": 1e300, "cst_seconds": -1}, "x" * 50: {}, "1": 7}, "stager": 3},
]


def _changed(value: Any, odd: random.Random) -> Any:
    if isinstance(value, dict) and value and odd.random() < 0.9:
        name = odd.choice(list(value))
        return value | {name: _changed(value[name], odd)}
    return odd.choice(_ODD)


@each_seed(30)
def test_a_log_with_odd_values_gives_a_page(seed: int, tmp_path: Path) -> None:
    odd = random.Random(seed)
    lines = [json.loads(line) for path in (STATUS, EVENTS) for line in path.read_text().splitlines()]
    path = tmp_path / "log"
    made = [_changed(line, odd) if odd.random() < 0.3 else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in made))
    facts = facts_of(path, price=1.0)
    text = page_of(facts)
    Page(text)
    assert " nan " not in text.lower()
    assert '="nan"' not in text
    assert '="inf"' not in text
    if facts.goodput is not None:
        assert all(value >= 0 for value in facts.goodput.parts.values()), facts.goodput
