"""What is decided before vLLM is imported, which reads it then."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from worker.engines.vllm.library import _choose_sums, let_llvmlite_be_scanned, log_version
from worker.engines.vllm.prefix_cache import keep_names_plain
from worker.settings import WorkerSettings

SWITCH = "VLLM_BATCH_INVARIANT"
EXACT, USUAL = (
    WorkerSettings(model_path=Path("/m"), engine="vllm", device="cuda", deterministic=exact)
    for exact in (True, False)
)


@pytest.fixture(autouse=True)
def no_vllm_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setenv(SWITCH, "0")


def test_deterministic_mode_switches_vllms_own_on() -> None:
    _choose_sums(EXACT)
    assert os.environ[SWITCH] == "1"


@pytest.mark.parametrize(("stated", "expected"), [("1", "1"), ("0", "0"), (None, "0")])
def test_without_it_the_environment_decides(
    stated: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stated is None:
        monkeypatch.delenv(SWITCH)
    else:
        monkeypatch.setenv(SWITCH, stated)
    _choose_sums(USUAL)
    assert os.environ[SWITCH] == expected


def test_it_does_not_change_once_vllm_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap to a deterministic model, say: parts of vLLM have read the switch."""
    _choose_sums(USUAL)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    _choose_sums(USUAL)
    with pytest.raises(ValueError, match=r"DETERMINISTIC cannot change in a .* another instance"):
        _choose_sums(EXACT)
    assert os.environ[SWITCH] == "0"
    monkeypatch.setenv(SWITCH, "1")
    _choose_sums(EXACT)


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.32.1", "tested with"), ("0.33.0", "read and never run"), ("0.40.0+cu130", "not known")],
)
def test_the_log_says_how_well_a_version_is_known(
    version: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    log_version(f"vllm {version}")
    assert said in caplog.text and (said == "tested with") == (
        caplog.records[0].levelname == "INFO"
    )


class Ahead:
    """A configuration of vLLM 0.33 with a draft model that reads one token ahead."""

    class speculative_config:
        disable_lookahead_block_hashes = False

    can_switch = True

    @property
    def num_hash_lookahead_tokens(self) -> int:
        return int(not (self.can_switch and self.speculative_config.disable_lookahead_block_hashes))


def test_blocks_are_named_by_their_own_tokens_only() -> None:
    keep_names_plain(object())  # 0.32 has no others
    config = Ahead()
    keep_names_plain(config)
    assert config.speculative_config.disable_lookahead_block_hashes
    config.can_switch = False
    with pytest.raises(ValueError, match="PREFIX_CACHE=false"):
        keep_names_plain(config)


def test_what_finds_a_function_by_any_name_is_left_out_of_vllms_scan() -> None:
    """vLLM asks every object of every module for its ``__dict__``, and believes what it gets."""
    ffi = pytest.importorskip("llvmlite.binding.ffi")
    for _ in range(2):
        let_llvmlite_be_scanned()
        assert not hasattr(ffi.lib, "__dict__")
    assert callable(ffi.lib.LLVMPY_GetVersionInfo)
