"""Settings are read once, and a bad value says which one it is."""

import asyncio
from pathlib import Path

import pytest

from catalog.paths import JOURNAL_BY_DEFAULT
from orchestrator.__main__ import open_the_journal
from orchestrator.settings import InvalidSettings, load_settings, whole_settings
from orchestrator.sharing import Sharing
from orchestrator.tasks.journal.file import JournalError
from worker.environment import names_of


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_environment_over_file_over_default(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "tidegate.toml").write_text(
        'port = 9001\ninstances = ["a:1"]\n[queue]\nmax_waiting = 7\nwhen_full = "drop-lru"\n'
    )
    monkeypatch.setenv("TIDEGATE_PORT", "9002")
    monkeypatch.setenv("TIDEGATE_QUEUE__MAX_WAITING", "8")
    settings = load_settings()
    assert (settings.port, settings.instances) == (9002, ("a:1",))
    assert (settings.queue.max_waiting, settings.queue.when_full) == (8, "drop-lru")
    assert load_settings(port="9003").port == 9003


def test_a_journal_by_default_is_only_for_where_nothing_is_said_of_one(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OR-5: ``tidegate up`` names one; environment, file, or empty for none go before it."""
    assert load_settings().journal.path is None
    monkeypatch.setenv(JOURNAL_BY_DEFAULT, "/home/default.db")
    assert load_settings(journal__loss_window_ms=1.0).journal.path == Path("/home/default.db")
    (elsewhere / "tidegate.toml").write_text('journal.path = "mine.db"')
    assert load_settings().journal.path == Path("mine.db")
    monkeypatch.setenv("TIDEGATE_JOURNAL__PATH", "")
    assert load_settings().journal.path is None


@pytest.mark.parametrize(
    "asked", [{}, {"journal__keep_results_s": 9.0}, {"journal__loss_window_ms": 1.0}]
)
async def test_a_journal_by_default_that_cannot_be_opened_is_done_without(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object]
) -> None:
    """Unless somebody counts on it."""
    monkeypatch.setenv(JOURNAL_BY_DEFAULT, "/dev/null/journal.db")
    settings = await asyncio.to_thread(load_settings, port=0, **asked)
    if asked:
        with pytest.raises(JournalError, match=r"journal.db: "):
            await open_the_journal(settings, Sharing())
    else:
        assert await open_the_journal(settings, Sharing()) is None


def test_instances_are_a_list_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_INSTANCES", "127.0.0.1:8001, [::1]:8002,gpu-3:8001")
    assert load_settings().instances == ("127.0.0.1:8001", "[::1]:8002", "gpu-3:8001")
    monkeypatch.setenv("TIDEGATE_INSTANCES", "")
    assert load_settings().instances == (), "only those that are registered"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "eighty"),
        ("INSTANCES", "localhost"),
        ("INSTANCES", "http://localhost:8001"),
        ("INSTANCES", "a:1,a:1"),
        ("DEADLINES__DEFAULT_S", "-1"),
        ("DEADLINES__MAX_S", "inf"),
        ("QUEUE__MAX_WAITING", "-2"),
        ("TOKEN", "two words"),
        ("LANES__PER_INSTANCE", "11"),
        ("LIMITS__EACH_KEY__CONCURRENT", "few"),
    ],
)
def test_a_bad_value_fails_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TIDEGATE_{name}", value)
    with pytest.raises(InvalidSettings, match=f"TIDEGATE_{name}"):
        load_settings()


def test_or12_off_loopback_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """OR-12."""
    with pytest.raises(InvalidSettings, match="TIDEGATE_TOKEN"):
        load_settings(host="0.0.0.0")
    monkeypatch.setenv("TIDEGATE_TOKEN", "secret")
    settings = load_settings(host="0.0.0.0")
    assert "secret" not in repr(settings)
    for host in ("localhost", "127.0.0.2", "::1"):
        monkeypatch.delenv("TIDEGATE_TOKEN", raising=False)
        assert load_settings(host=host).token is None


def test_a_file_with_an_unknown_setting_or_no_toml(elsewhere: Path) -> None:
    (elsewhere / "tidegate.toml").write_text("prot = 9001\n[queue]\nmax_wating = 1\n")
    with pytest.raises(
        InvalidSettings, match=r"queue\.max_wating: not a setting(.|\n)*prot: not a setting"
    ):
        load_settings()
    (elsewhere / "tidegate.toml").write_text("port = = 1\n")
    with pytest.raises(InvalidSettings, match=r"tidegate\.toml"):
        load_settings()


def test_an_unknown_name_is_refused_wherever_it_stands(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "tidegate.toml").write_text("journal_path = 'x'\n[journal]\nkey = 'x'\n")
    monkeypatch.setenv("TIDEGATE_QUEUE_MAX_WAITING", "7")
    with pytest.raises(InvalidSettings) as caught:
        load_settings(queue_size=3)
    told = str(caught.value).splitlines()
    assert told[0].endswith("not a setting; did you mean TIDEGATE_QUEUE__MAX_WAITING?")
    assert all("not a setting" in line for line in told)
    names = {line.partition(":")[0] for line in told[1:]}
    assert names == {"queue_size", "journal_path", "journal.key"}
    monkeypatch.delenv("TIDEGATE_QUEUE_MAX_WAITING")
    monkeypatch.setenv("TIDEGATE_ADMISSION", "off")
    with pytest.raises(InvalidSettings, match="TIDEGATE_ADMISSION: expected JSON"):
        load_settings()


def test_what_others_read_and_kubernetes_adds_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "TIDEGATE_HOME",
        "TIDEGATE_WORKER__MODEL_NAME",
        "TIDEGATE_SERVICE_HOST",
        "TIDEGATE_SERVICE_PORT_HTTP",
        "TIDEGATE_PORT_8080_TCP_ADDR",
        "TIDEGATED",
    ):
        monkeypatch.setenv(name, "x")
    load_settings()


def test_no_setting_is_taken_for_one_of_a_worker() -> None:
    """``tidegate up`` hands its environment on, and a worker refuses what it does not know."""
    for prefix in ("worker_", "slot_"):
        assert not [name for name in names_of(whole_settings()) if name.startswith(prefix)]
