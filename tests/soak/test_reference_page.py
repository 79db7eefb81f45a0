"""Nightly, what tests/pages/test_pages.py does with the other pages: each command of docs/cli.md, typed."""

from __future__ import annotations

import pytest

from tests.pages.test_pages import check_every_line, scene
from tests.support.page_scene import Scene
from tests.support.typing_pages import REFERENCE

__all__ = ["scene"]  # a fixture
pytestmark = [pytest.mark.mpi, pytest.mark.s3, pytest.mark.timeout(600)]


def test_every_line_of_the_reference_does_what_it_is_for(scene: Scene) -> None:
    check_every_line(REFERENCE, scene)
