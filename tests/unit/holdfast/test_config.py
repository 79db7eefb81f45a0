"""Settings: their sources, which one wins, and the message for a wrong one."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import RING_CHUNKS_MIN, FlusherConfig, StagerConfig, TrainerConfig, parse_size
from holdfast.errors import ConfigError
from holdfast.image.best_rule import BestRule
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import WHOLE, ShareNumber

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def bare_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty working directory, without the user's HOLDFAST_ variables."""
    for variable in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_toml(text: str) -> None:
    Path("holdfast.toml").write_text(text)


def test_settings_have_the_documented_defaults() -> None:
    stager = StagerConfig(store="/run")
    assert (stager.chunk_bytes, stager.ring_bytes) == (None, None)
    assert [stager.ring_chunks(chunk * MIB) for chunk in (4, 16, 64)] == [64, 16, RING_CHUNKS_MIN]
    assert (stager.keep_last, stager.keep_every, stager.verify, stager.linger, stager.writers) == (
        3,
        0,
        True,
        False,
        None,
    )
    assert (stager.offer_seconds_max, stager.chunk_seconds_max, stager.start_seconds_max) == (60, 120, 300)
    assert stager.runtime_dir == Path(f"/dev/shm/holdfast-{os.getuid()}")
    trainer = TrainerConfig()
    assert trainer.events is None
    assert (trainer.start_seconds_max, trainer.stager_seconds_max, trainer.close_seconds_max) == (
        300,
        30,
        600,
    )
    assert trainer.restore_seconds_max == 600
    assert FlusherConfig(store="/run").heartbeat_seconds == 5


def test_arguments_beat_environment_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StagerConfig(store="s").keep_last == 3
    write_toml("keep_last = 4")
    assert StagerConfig(store="s").keep_last == 4
    monkeypatch.setenv("HOLDFAST_KEEP_LAST", "5")
    assert StagerConfig(store="s").keep_last == 5
    assert StagerConfig(store="s", keep_last=6).keep_last == 6


def test_an_argument_that_was_not_given_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STORE", "/from/environment")
    config = StagerConfig.from_sources(store=None, keep_last=None, verify=False)
    assert (config.store, config.keep_last, config.verify) == ("/from/environment", 3, False)


def test_the_table_of_a_role_beats_the_top_level_and_is_its_own() -> None:
    write_toml(
        'store = "s"\nstart_seconds_max = 7\n[stager]\nstart_seconds_max = 8\n[flusher]\ngrace_seconds = 0\n'
    )
    assert StagerConfig.from_sources().start_seconds_max == 8
    assert TrainerConfig.from_sources().start_seconds_max == 7
    assert FlusherConfig.from_sources().grace_seconds == 0


def test_a_key_of_another_role_at_the_top_level_is_fine() -> None:
    write_toml("close_seconds_max = 9\nwriters = 4\n")
    assert TrainerConfig().close_seconds_max == 9
    assert StagerConfig(store="s").writers == 4


def test_another_file_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_toml("keep_last = 4")
    other = tmp_path / "other.toml"
    other.write_text("keep_last = 9")
    monkeypatch.setenv("HOLDFAST_CONFIG", str(other))
    assert StagerConfig(store="s").keep_last == 9


def test_a_named_file_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CONFIG", "gone.toml")
    with pytest.raises(ConfigError, match=r"gone\.toml.*HOLDFAST_CONFIG"):
        TrainerConfig()


def test_a_file_that_is_not_toml() -> None:
    write_toml("keep_last = = 4")
    with pytest.raises(ConfigError, match=r"holdfast\.toml: expected TOML.*line 1.*HOLDFAST_CONFIG"):
        TrainerConfig()


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("keep_lst = 4", "keep_lst", "keep_last"),
        ("[stager]\nring_byte = 4", "ring_byte", "ring_bytes"),
        ("[trainer]\nstart_second_max = 1", "start_second_max", "start_seconds_max"),
        ("[flushr]\nverify = true", "flushr", "flusher"),
    ],
)
def test_an_unknown_key_is_named_with_its_file_and_the_nearest(text: str, key: str, nearest: str) -> None:
    write_toml(text)
    for role in (TrainerConfig, StagerConfig, FlusherConfig):
        with pytest.raises(
            ConfigError, match=rf"holdfast\.toml.*{key}: no such setting; did you mean {nearest}\?"
        ):
            role.from_sources(store=None if role is TrainerConfig else "s")


def test_a_role_that_is_no_table() -> None:
    write_toml("stager = 4")
    with pytest.raises(ConfigError, match=r"expected the table \[stager\], got 4"):
        TrainerConfig()


def test_a_setting_of_another_role_as_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="ring_byte: no such setting; did you mean ring_bytes"):
        StagerConfig.from_sources(store="s", ring_byte=1)


def test_a_missing_value_says_how_to_give_it() -> None:
    with pytest.raises(
        ConfigError, match=r"store: expected a value.*--store.*HOLDFAST_STORE.*holdfast\.toml"
    ):
        StagerConfig.from_sources()


def test_a_wrong_value_says_expected_got_and_where_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"writers: expected greater than or equal to 1, got 0 \(as argument\)"
    ):
        StagerConfig(store="s", writers=0)
    monkeypatch.setenv("HOLDFAST_WRITERS", "many")
    with pytest.raises(ConfigError, match=r"writers: expected .*integer.*'many' \(from HOLDFAST_WRITERS\)"):
        StagerConfig(store="s")
    monkeypatch.delenv("HOLDFAST_WRITERS")
    write_toml("writers = -1")
    with pytest.raises(ConfigError, match=r"got -1 \(from holdfast\.toml\)"):
        StagerConfig(store="s")


def test_all_wrong_values_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        StagerConfig(store="", writers=0, keep_last=-1)
    assert [name in str(caught.value) for name in ("store", "writers", "keep_last")] == [True] * 3


@pytest.mark.parametrize(
    "field", ["start_seconds_max", "stager_seconds_max", "close_seconds_max", "restore_seconds_max"]
)
@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan"])
def test_deadlines_are_finite_and_above_zero(field: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"HOLDFAST_{field.upper()}", value)
    with pytest.raises(ConfigError, match=field):
        TrainerConfig()


@pytest.mark.parametrize(("text", "every"), [("auto", "auto"), ("50", 50), ("0", 0), (" 7 ", 7)])
def test_the_interval_is_a_number_or_auto(
    text: str, every: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_EVERY", text)
    assert TrainerConfig().every == every


@pytest.mark.parametrize("value", ["sometimes", "-1", "2.5", "AUTO", "1e3"])
def test_an_invalid_interval_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_EVERY", value)
    with pytest.raises(
        ConfigError, match=r'every: expected 0 or more steps, or "auto", got .* \(from HOLDFAST_EVERY'
    ):
        TrainerConfig()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("overhead_max", "0"),
        ("overhead_max", "1.5"),
        ("overhead_max", "-0.1"),
        ("every_seconds_max", "0"),
        ("mtbf_hours", "0"),
        ("mtbf_hours", "inf"),
        ("dollars_per_hour", "-1"),
        ("dollars_per_hour", "nan"),
    ],
)
def test_bounds_of_the_interval_are_checked(field: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"HOLDFAST_{field.upper()}", value)
    with pytest.raises(ConfigError, match=f"{field}: expected"):
        TrainerConfig()


def test_the_ring_holds_at_least_eight_chunks() -> None:
    least = RING_CHUNKS_MIN * 16 * MIB
    assert StagerConfig.from_sources(store="s", ring_bytes=least).ring_chunks(16 * MIB) == RING_CHUNKS_MIN
    with pytest.raises(
        ConfigError,
        match=f"ring_bytes: expected at least {least} bytes, which is 8 chunks of {16 * MIB} bytes",
    ):
        StagerConfig.from_sources(store="s", ring_bytes=least - 1)


def test_the_ring_is_checked_against_chunks_from_another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CHUNK_BYTES", "256MiB")
    with pytest.raises(ConfigError, match="ring_bytes"):
        FlusherConfig.from_sources(store="s", ring_bytes="1GiB")
    assert FlusherConfig(store="s").ring_chunks(256 * MIB) == 8
    assert FlusherConfig.from_sources(store="s", ring_bytes="2GiB").ring_chunks(256 * MIB) == 8


@pytest.mark.parametrize("value", ["1000", "0", "2GiB", "4097"])
def test_chunks_are_whole_pages_and_fit_one_message(value: str) -> None:
    with pytest.raises(ConfigError, match="chunk_bytes"):
        StagerConfig.from_sources(store="s", chunk_bytes=value, ring_bytes="64GiB")


def test_settings_are_frozen() -> None:
    config = TrainerConfig()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.start_seconds_max = 1  # type: ignore[misc]


def test_a_misspelt_variable_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_KEEPLAST", "5")
    monkeypatch.setenv("HOLDFAST_SOMETHING_ELSE_ALTOGETHER", "5")
    with caplog.at_level(logging.WARNING, logger="holdfast.config"):
        assert StagerConfig(store="s").keep_last == 3
    assert "HOLDFAST_KEEPLAST is not used; did you mean HOLDFAST_KEEP_LAST?" in caplog.text
    assert "ALTOGETHER" not in caplog.text


def test_an_empty_variable_was_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_KEEP_LAST", "")
    assert StagerConfig(store="s").keep_last == 3


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 * MIB),
        ("1GiB", 1024 * MIB),
        ("16 MB", 16_000_000),
        (" 1.5 gib ", 1536 * MIB),
        ("4096", 4096),
        ("7B", 7),
        ("0.001kB", 1),
        ("2TiB", 2 << 40),
        (4096, 4096),
        (0, 0),
    ],
)
def test_a_size_is_parsed_into_bytes(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "-1MiB", "1 parsec", "0.1B", "1e6", "0x10", "1,5GiB", "16M", True, -1]
)
def test_an_invalid_size_is_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match="bytes"):
        parse_size(text)


@given(st.integers(0, 2**60), st.sampled_from([("KiB", 1), ("MiB", 2), ("GiB", 3)]))
def test_whole_units_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{number}{unit[0]}") == number * 1024 ** unit[1]


def test_checkpoints_to_set_aside_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainerConfig().restore_set_aside == ()
    write_toml('[trainer]\nrestore_set_aside = ["1200-a3", "5-a1"]')
    assert TrainerConfig().restore_set_aside == (CheckpointId(3, 1200), CheckpointId(1, 5))
    monkeypatch.setenv("HOLDFAST_RESTORE_SET_ASIDE", " 7-a002 ,")
    assert TrainerConfig().restore_set_aside == (CheckpointId(2, 7),)
    assert TrainerConfig(restore_set_aside=(CheckpointId(1, 1),)).restore_set_aside == (CheckpointId(1, 1),)


@pytest.mark.parametrize(
    "value", ["1200", "newest", "5-a0", "-1-a1", "5-a1;7-a1", "5-a1,x", "9" * 40 + "-a1", "\0"]
)
def test_a_checkpoint_to_set_aside_that_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "\0" not in value:
        monkeypatch.setenv("HOLDFAST_RESTORE_SET_ASIDE", value)
        with pytest.raises(ConfigError) as caught:
            TrainerConfig()
        assert str(caught.value) == (
            "trainer setting restore_set_aside: expected checkpoints as STEP-aATTEMPT, such as 1200-a3, separated by "
            f"commas, got {value!r} (from HOLDFAST_RESTORE_SET_ASIDE)"
        )
    monkeypatch.delenv("HOLDFAST_RESTORE_SET_ASIDE", raising=False)
    with pytest.raises(ConfigError, match="restore_set_aside: expected checkpoints as STEP-aATTEMPT"):
        TrainerConfig.from_sources(restore_set_aside=[value])


@pytest.mark.parametrize("value", [5, 1.5, True, {"a": 1}, [5], [[1, 5]], [None]])
def test_a_set_aside_list_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"restore_set_aside: expected checkpoints as STEP-aATTEMPT.*got"):
        TrainerConfig.from_sources(restore_set_aside=value)


SECRET = "kept-to-oneself-" * 4


def test_the_key_of_a_run_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_KEY", SECRET)
    config = TrainerConfig(connections=3)
    assert config.key is not None
    assert config.key.get_secret_value() == SECRET
    for shown in (repr(config), str(config), config.model_dump_json(), str(config.model_dump())):
        assert SECRET not in shown
    for role in (TrainerConfig, StagerConfig):
        with pytest.raises(
            ConfigError, match=f"{role.role} setting key: .*a value that is not shown"
        ) as caught:
            role.from_sources(key=[SECRET], store="/run") if role is StagerConfig else role(key=[SECRET])
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("value", ["host", "host:", ":1", "host:port", "host:65536", "fd00::1:29411"])
def test_a_stager_that_is_no_address(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STAGER", value)
    with pytest.raises(ConfigError, match=r"trainer setting stager: expected .*got .*from HOLDFAST_STAGER"):
        TrainerConfig()


@pytest.mark.parametrize("name", ["s3://bucket/run@12", "/mnt/nfs/run@0", "/mnt/run@latest", "/mnt/run@7/"])
@pytest.mark.parametrize("role", [StagerConfig, FlusherConfig, TrainerConfig])
def test_a_run_is_not_named_like_a_step_of_another_run(name: str, role: type[TrainerConfig]) -> None:
    with pytest.raises(ConfigError, match="expected another name: commands read `@latest`"):
        role.from_sources(store=name)
    for other in ("s3://bucket/run@12/a", "/mnt/a@b", "/mnt/run@", "/mnt/@3x"):
        assert role.from_sources(store=other).store == other


def test_a_path_that_the_locale_cannot_decode_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"set LC_ALL=C\.UTF-8, or PYTHONUTF8=1"):
        StagerConfig.from_sources(store=b"/mnt/l\xc3\xa4ufe".decode("ascii", "surrogateescape"))


def test_in_the_file_the_trainers_stager_stands_in_their_table() -> None:
    write_toml('[trainer]\nstager = "[fd00::1]:29411"\nconnections = 16')
    assert (TrainerConfig().stager, TrainerConfig().connections) == ("[fd00::1]:29411", 16)
    write_toml('stager = "host:29411"')
    with pytest.raises(ConfigError, match=r"expected the table \[stager\], got 'host:29411'"):
        TrainerConfig()


def test_keep_best_needs_a_metric_and_the_metric_a_mode() -> None:
    whole = StagerConfig(store="s", keep_best=3, best_metric="val_loss", best_mode="min")
    assert whole.best_rule == BestRule(metric="val_loss", mode="min")
    assert StagerConfig(store="s").best_rule is None
    with pytest.raises(ConfigError, match="keep_best: expected 0 unless best_metric and best_mode are set"):
        StagerConfig(store="s", keep_best=3)
    with pytest.raises(
        ConfigError, match="best_mode: expected min or max: whether the lowest or the highest acc"
    ):
        StagerConfig(store="s", best_metric="acc")
    with pytest.raises(ConfigError, match="best_metric: expected the name of a metric"):
        StagerConfig(store="s", best_metric=" acc", best_mode="max")


def test_a_share_is_one_of_several_stagers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StagerConfig(store="s").share == WHOLE
    monkeypatch.setenv("HOLDFAST_SHARE", "2/3")
    stager = StagerConfig(store="s", listen="a:1")
    assert stager.share == FlusherConfig(store="s").share == ShareNumber(1, 3)
    with pytest.raises(ConfigError, match=r"listen: expected HOST:PORT if share is 2/3"):
        StagerConfig(store="s")
    with pytest.raises(ConfigError, match=r"share: expected a share as K/S.*such as 2/3"):
        FlusherConfig(store="s", share="4/3")


def test_several_stagers_are_named_in_the_order_of_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainerConfig().stagers == ()
    monkeypatch.setenv("HOLDFAST_STAGER", "b:2, a:1")
    config = TrainerConfig()
    assert (config.stager, config.stagers) == ("b:2,a:1", ("b:2", "a:1"))
    assert TrainerConfig(stager=["a:1", "[::1]:2"]).stagers == ("a:1", "[::1]:2")
    for wrong in ("a:1,a:1", "a:1,", ",".join(f"a:{port}" for port in range(1, 66))):
        with pytest.raises(ConfigError, match="stager: expected"):
            TrainerConfig(stager=wrong)


def test_the_tier_store_is_refused_and_the_own_stager_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tiers: .*instead of the tier store set HOLDFAST_STAGER=own"):
        TrainerConfig(tiers=("memory", "store"))


def test_stager_is_an_address_or_own() -> None:
    for own in ("own", "own-per-node"):
        assert TrainerConfig(stager=own).stager == own
    assert TrainerConfig(stager="node-0:29411").stager == "node-0:29411"
    for wrong in ("mine", "own:7000000", ""):
        with pytest.raises(
            ConfigError, match=r"stager: expected own, own-per-node, or .*HOST:PORT|a port from 0"
        ):
            TrainerConfig(stager=wrong)


def test_several_stagers_are_not_replaced_by_one() -> None:
    for several in ("a:1,b:1", "own-per-node"):
        with pytest.raises(ConfigError, match="one address where on_stager_lost is own"):
            TrainerConfig(stager=several, on_stager_lost="own")
