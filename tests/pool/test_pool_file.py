"""``pool.toml``: read whole or refused with the key, and the examples fit (PV-1)."""

import re
from pathlib import Path

import pytest

from catalog.errors import PoolFileInvalid
from catalog.paths import ROOT
from pool.fleet.specs import InstanceSpec, OrchestratorSpec, specs_of
from pool.pool_file import PoolFile, parse_pool_file, read_pool_file
from tests.support.cases import for_each

ONE = '[[instances]]\nname = "a"\nmodel = "demo"\n'


def instances(text: str) -> dict[str, InstanceSpec]:
    specs = specs_of(parse_pool_file(text)).items()
    return {name: spec for name, spec in specs if isinstance(spec, InstanceSpec)}


def test_the_documentations_example_fits() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/pool.md").read_text(), re.S)
    assert set(specs_of(parse_pool_file(example))) == {"chat", "chat-1", "orchestrator"}


def test_dockers_example_fits() -> None:
    file = read_pool_file(ROOT / "docker/pool.toml")
    assert [entry.groups for entry in file.instances] == [(("0",), ("1",))]


def test_every_key_of_the_file_is_documented() -> None:
    page = (ROOT / "docs/pool.md").read_text()
    schema = PoolFile.model_json_schema(by_alias=True)
    keys = {key for kind in schema["$defs"].values() for key in kind["properties"]}
    assert not [key for key in keys if f"`{key}`" not in page]


@for_each(
    ("text", "said"),
    [
        ("[pool\n", r"p:? ?.*line 1"),
        ("[pool]\nhart = 1\n", "p: pool.hart: unknown key; "),
        ("\n[pool]\n\nheartbeat_s = 0\n", "p: pool.heartbeat_s: .*greater than 0"),
        (ONE + '[[instances]]\nname = "b"\n', r"p: instances\[1\].model: Field required"),
        (ONE + ONE, "p: the file: two instances would be called a; rename one"),
        (ONE.replace('"a"', '"A b"'), r"p: instances\[0\].name: "),
        (ONE + 'devices = "gpu"\n', r'.devices: expected "cpu" or a list of GPUs'),
        (ONE + "devices = []\n", r"p: instances\[0\].devices: "),
        (ONE + 'devices = [0, "0"]\n', "named twice"),
        (ONE + 'engine = "tensorflow"\n', "expected one of auto, torch, "),
        (ONE + "settings = { max_runing = 1 }\n", r"did you mean max_running\?"),
        (ONE + "settings = { max_running = [1] }\n", r"settings.max_running: .*valid integer"),
        (
            ONE + "[instances.settings]\nmax_running = 1\nkv.blocks = -1\n",
            r"p: instances\[0\].settings: kv.blocks: .*equal to 0, got -1",
        ),
        (
            ONE + "[instances.settings]\nmax_running = 1\nkv_blocks = 4\n",
            r"settings: kv_blocks: not a .*; did you mean kv.blocks\?",
        ),
        ("[orchestrator]\nsettings.queue.max_waiting = -2\n", "equal to -1, got -2"),
        (ONE + 'settings.plain.token = "x"\n', "variable TIDEGATE_WORKER__PLAIN__TOKEN"),
        (
            ONE + 'settings = { device = "cpu" }\n',
            r"p: instances\[0\].settings: device: not set here: set it with devices",
        ),
        ('[orchestrators]\nregister = ["file:x"]\n', "register: expected http://HOST:PORT"),
        ('[orchestrators]\nregister = ["http://x/v2"]\n', "without a path"),
        ('[orchestrators]\nregister = ["http://me:secret@x"]\n', r"or a password, got 'x'"),
        ("[pool]\ndrain_s = inf\n", "p: pool.drain_s: "),
        (ONE + 'devices = ["0,0"]\n', "twice in the group '0,0'"),
        (
            ONE + "ports = { http = 8000, grpc = 8010 }\ncount = 2\n",
            "http port of a-1 and the grpc",
        ),
        (ONE + "ports = { grpc = 65530 }\ncount = 2\n", "grpc port of a-1 would be 65540"),
        ("x = " + "[" * 5000, "nested too deeply"),
        (
            "".join(ONE.replace('"a"', f'"a{i}"') + "count = 64\n" for i in range(5)),
            "at most 256 instances, got 320",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_its_key(text: str, said: str) -> None:
    with pytest.raises(PoolFileInvalid, match=said):
        parse_pool_file(text, "p")


def test_of_very_many_mistakes_the_first_are_said() -> None:
    with pytest.raises(PoolFileInvalid) as raised:
        parse_pool_file("[[instances]]\nnam = 1\n" * 3000, "p")
    lines = str(raised.value).splitlines()
    assert len(lines) == 21 and lines[-1] == "p: and 8980 more"


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(PoolFileInvalid, match=r"cannot read .*none.toml: No such file"):
        read_pool_file(tmp_path / "none.toml")


def test_instances_take_devices_in_turn_and_can_go_to_the_others() -> None:
    found = instances(ONE + 'devices = [0, "1,2"]\ncount = 3\n')
    assert {name: spec.groups for name, spec in found.items()} == {
        "a": (("0",), ("1", "2")),
        "a-1": (("1", "2"), ("0",)),
        "a-2": (("0",), ("1", "2")),
    }
    assert found["a"].settings["TIDEGATE_WORKER__DEVICE"] == "cuda"


def test_an_engine_on_one_gpu_is_given_no_group() -> None:
    with pytest.raises(PoolFileInvalid, match=r"torch uses one GPU: list GPUs one by one"):
        instances(ONE + 'engine = "torch"\ndevices = ["0,1"]\n')
    assert instances(ONE + 'engine = "vllm"\ndevices = ["0,1"]\n')["a"].groups == (("0", "1"),)


def test_settings_and_ports_are_given_to_each() -> None:
    more = "count = 2\nmemory_gib = 3\nports = { grpc = 9001 }\nsettings = { overlap = false }\n"
    found = instances(ONE + more)
    assert [spec.ports.grpc for spec in found.values()] == [9001, 9011]
    assert [spec.ports.http for spec in found.values()] == [0, 0]
    assert found["a-1"].settings == {
        "TIDEGATE_WORKER__ENGINE": "auto",
        "TIDEGATE_WORKER__DEVICE": "cpu",
        "TIDEGATE_WORKER__OVERLAP": "false",
        "TIDEGATE_WORKER__MEMORY__HARD_GIB": "3.0",
    }


def test_settings_in_tables_and_with_dots_are_the_same() -> None:
    spelled = (
        "settings = { kv = { blocks = 4, prefix_cache = false }, dtype = 'float32' }\n",
        "settings.kv.blocks = 4\nsettings.kv.prefix_cache = false\nsettings.dtype = 'float32'\n",
        "[instances.settings]\ndtype = 'float32'\n[instances.settings.kv]\nblocks = 4\n"
        "prefix_cache = false\n",
        "settings = { 'kv.blocks' = 4, kv.prefix_cache = false, dtype = 'float32' }\n",
    )
    for text in spelled:
        assert instances(ONE + text)["a"].settings == {
            "TIDEGATE_WORKER__ENGINE": "auto",
            "TIDEGATE_WORKER__DEVICE": "cpu",
            "TIDEGATE_WORKER__DTYPE": "float32",
            "TIDEGATE_WORKER__KV__BLOCKS": "4",
            "TIDEGATE_WORKER__KV__PREFIX_CACHE": "false",
        }


def test_one_more_changes_no_other_and_what_an_instance_is_does() -> None:
    before, more = instances(ONE + "count = 2\n"), instances(ONE + "count = 3\n")
    for fewer in (instances(ONE), before):
        assert {n: more[n].digest for n in fewer} == {n: one.digest for n, one in fewer.items()}
    patient = instances("[pool]\nload_timeout_s = 9\n" + ONE + "count = 2\n")
    assert patient["a"].digest == before["a"].digest, "how long loading may take is no change"
    for change in ("settings = { max_running = 2 }\n", "ports = { http = 1 }\n", "devices = [0]\n"):
        assert instances(ONE + "count = 2\n" + change)["a"].digest != before["a"].digest


def test_the_orchestrator_on_this_machine_has_its_settings() -> None:
    told = (
        "[orchestrator]\nport = 0\nsettings = { queue.max_waiting = 7, dispatch.pause = false }\n"
    )
    beside = specs_of(parse_pool_file(told))["orchestrator"]
    assert isinstance(beside, OrchestratorSpec)
    assert beside.settings == {
        "TIDEGATE_QUEUE__MAX_WAITING": "7",
        "TIDEGATE_DISPATCH__PAUSE": "false",
    }
