"""How instances of other kinds are named, and what is said of names that cannot be used."""

from pathlib import Path

import pytest

from orchestrator.instances.addresses import check_entry
from orchestrator.lanes import ServerKind, kind_of, name_of
from orchestrator.lanes.endpoint import read_endpoint
from orchestrator.settings import InvalidSettings, load_settings
from tests.support.cases import for_each


def test_a_url_says_all_that_has_to_be_known() -> None:
    one = read_endpoint(
        "vllm+http://gpu-1:8000/api?tokenizer=/models/llama&model=meta/llama&alias=llama&name=v1"
        "&context=4096&slots=16&abort_ms=12.5&weights=abc&key_file=/run/key"
    )
    assert (one.kind, one.name) == (ServerKind.VLLM, "v1")
    assert one.base_url == "http://gpu-1:8000/api"
    assert (one.model, one.alias) == ("meta/llama", "llama")
    assert (one.context, one.slots, one.abort_ms, one.weights) == (4096, 16, 12.5, "abc")
    assert (one.tokenizer, one.key_file) == (Path("/models/llama"), Path("/run/key"))


@for_each(
    ("entry", "kind", "name"),
    [
        ("gpu-1:8001", ServerKind.TIDEGATE, "gpu-1:8001"),
        ("vllm+https://[::1]:80?tokenizer=t", ServerKind.VLLM, "vllm@[::1]:80"),
        ("llamacpp+http://h:1?tokenizer=t", ServerKind.LLAMACPP, "llamacpp@h:1"),
        ("tgi+http://h:1/?tokenizer=t", ServerKind.TGI, "tgi@h:1"),
    ],
)
def test_kind_and_name_follow_from_the_entry(entry: str, kind: ServerKind, name: str) -> None:
    assert check_entry(entry) == entry
    assert (kind_of(entry), name_of(entry)) == (kind, name)


@for_each(
    ("entry", "said"),
    [
        ("http://h:1?tokenizer=t", "available: vllm\\+http"),
        ("vllm+http://h?tokenizer=t", "expected vllm\\+http://host:port"),
        ("vllm+http://u:p@h:1?tokenizer=t", "expected vllm\\+http://host:port"),
        ("vllm+http://h:1", "tokenizer.json is needed"),
        ("vllm+http://h:1?tokenizer=", "tokenizer is empty"),
        ("vllm+http://h:1?tokenizer=a&tokenizer=b", "stated twice"),
        ("vllm+http://h:1?tokenizer=t&slot=3", "'slot' is not a parameter; available: tokenizer"),
        ("vllm+http://h:1?tokenizer=t&slots=0", "slots must be a whole number above 0"),
        ("vllm+http://h:1?tokenizer=t&abort_ms=nan", "abort_ms must be milliseconds"),
        ("vllm+http://h:1?tokenizer=t&name=a/b", "name must be 1 to 128"),
        ("vllm+http://h:1?tokenizer=t&alias=a%20b", "alias must have"),
        ("dns:vllm+http://h:1?tokenizer=t", "a URL names one instance"),
    ],
)
def test_what_cannot_be_used_is_told_with_what_was_expected(entry: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_entry(entry)


def test_settings_take_urls_and_refuse_two_of_one_name() -> None:
    one, other = "vllm+http://h:1?tokenizer=a", "vllm+http://h:1?tokenizer=b"
    assert load_settings(instances=f"{one}, h:2").instances == (one, "h:2")
    with pytest.raises(InvalidSettings, match="same name"):
        load_settings(instances=f"{one},{other}")
