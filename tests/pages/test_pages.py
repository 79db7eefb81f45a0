"""What the pages tell a reader to type, typed: each line of a page into one shell, in order. Each ends with 0, if the
page says nothing else.

Left out is what tests/support/typing_pages.py names, with its reason. Two pages are typed at night: docs/tutorial.md by
tests/soak/test_tutorial.py, and docs/cli.md, a hundred commands, by tests/soak/test_reference_page.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.moto_s3 import running_moto
from tests.support.page_scene import Scene
from tests.support.s3_place import plain_client, s3_environment
from tests.support.swift import SwiftServer
from tests.support.typing_pages import REFERENCE, exit_code_of, plan

pytestmark = [pytest.mark.mpi, pytest.mark.s3, pytest.mark.timeout(600)]


PLAN = plan()


@pytest.fixture(scope="module")
def scene(swift_server: SwiftServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    s3 = s3_environment(swift_server.endpoint, swift_server.access_key, swift_server.secret_key)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.items():
            patch.setenv(name, value)
        client = plain_client()
        client.create_bucket(Bucket="bucket")
        client.close()
    with running_moto() as ec2:
        made = Scene(tmp_path_factory.mktemp("scene"), s3, ec2)
        try:
            made.make()
            yield made
        finally:
            made.close()


def check_every_line(page: str, scene: Scene) -> None:
    session = scene.type(page, PLAN[page])
    ended = [(line, session.codes.get(line.number)) for line in PLAN[page]]
    wrong = [f"{line}: {code}" for line, code in ended if code != exit_code_of(line)]
    assert not wrong, session.said


@pytest.mark.parametrize("page", [page for page in PLAN if page != REFERENCE])
def test_every_line_of_a_page_does_what_it_is_for(page: str, scene: Scene) -> None:
    check_every_line(page, scene)
