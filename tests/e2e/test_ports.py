"""Triton's own ports, as strangers find them; and a model loaded again under a running service."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import InferenceServerClient, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from catalog.paths import MODEL_REPOSITORY
from orchestrator.errors import TidegateError
from orchestrator.lanes.swap_call import ask_for_swap
from orchestrator.lanes.wire import to_frame, to_request
from pool.process.proc import children_of
from pool.units.triton_control import TritonControl
from protocol import PROTOCOL_VERSION, Code, Frame, Open, Swap
from tests.e2e.conftest import Stack, stack_of
from tests.support.processes import eventually
from tests.support.stack import Orchestrator, Triton, asked, running, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKEN = "the-lane-token-of-this-test"
BODY = {"model": "demo", "prompt": "Once", "max_tokens": 3}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Stack]:
    """A service whose Triton asks for tokens."""
    triton = Triton(
        engine="synthetic-paced",
        lane_token=TOKEN,
        plain__token="plain",
        **{"worker.service.drain.HOLD_S": 1.0},
    )
    yield from stack_of(triton, lanes__token=TOKEN)


def generates(stack: Stack) -> bool:
    return asked(f"{stack.url}/v1/completions", BODY)[0] == 200


async def first_frame(address: str, token: str = "") -> Frame:
    """What a stranger's ``Open`` is answered with."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(to_request(Open(PROTOCOL_VERSION, "stranger", token), "open"))
        frame = to_frame((await call.read()).infer_response)
        call.cancel()
        assert frame is not None
        return frame


async def test_a_stranger_opens_no_lane_drains_and_swaps_nothing(guarded: Stack) -> None:
    for token in ("", TOKEN[:-1]):
        frame = await first_frame(guarded.triton.grpc, token)
        assert frame.error is not None and frame.error.code is Code.UNAUTHENTICATED
        assert frame.card is None and frame.cache is None
        async with TritonControl(guarded.triton.grpc) as control:
            assert not await control.drain("llm", 0.0, 10.0, token=token)
        with pytest.raises(TidegateError, match="token"):
            await ask_for_swap(guarded.triton.grpc, Swap({"model_path": "/"}, token=token), print)
    assert (await first_frame(guarded.triton.grpc, TOKEN)).card is not None
    assert generates(guarded)


def test_no_local_user_reads_the_token(guarded: Stack) -> None:
    """It is in no command line and in no log; /proc shows the environment to its owner only."""
    assert TOKEN not in Path(f"/proc/{guarded.triton.server_pid}/cmdline").read_text()
    assert Path(f"/proc/{guarded.triton.server_pid}/environ").stat().st_mode & 0o077 == 0
    for log in (guarded.triton.log, guarded.orchestrator.log):
        assert TOKEN not in log.read_text()


def test_nobody_unloads_a_model_or_has_triton_write_files(guarded: Stack) -> None:
    """The key is in the command line for all to read, and no header can carry it."""
    for path in (
        "repository/models/llm/unload",
        "repository/models/llm/load",
        "repository/index",
        "systemsharedmemory/region/mine/register",
        "trace/setting",
        "logging",
    ):
        for _ in range(2):
            assert asked(f"{guarded.triton.http}/v2/{path}", {})[0] == 403
    with InferenceServerClient(guarded.triton.grpc) as client:
        for call in (
            lambda: client.unload_model("llm"),
            lambda: client.register_system_shared_memory("mine", "/mine", 64),
            lambda: client.update_log_settings({"log_file": "/tmp/written-by-a-stranger"}),
            lambda: client.update_trace_settings("llm", {"trace_file": "/tmp/written"}),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
    assert generates(guarded)


def test_a_model_loaded_again_serves_and_the_old_one_lets_go(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    shutil.copytree(MODEL_REPOSITORY, repository)
    triton = Triton(repository=repository, is_locked=False, engine="synthetic-paced")
    orchestrator = Orchestrator(triton.grpc)
    stack = Stack(triton, orchestrator)
    with started(triton), running(orchestrator), InferenceServerClient(triton.grpc) as client:
        assert generates(stack)
        (old,) = children_of(triton.server_pid)
        client.load_model("llm")
        assert children_of(triton.server_pid) == [old], "nothing had changed"

        (repository / "llm" / "1" / "note.txt").write_text("changed")
        client.load_model("llm")
        assert generates(stack), "the very next request"
        eventually(lambda: len(children_of(triton.server_pid)) == 1, "the old one to end")
        assert children_of(triton.server_pid) != [old]

        (repository / "llm" / "1" / "note.txt").write_text("changed again")
        client.load_model("llm")
        eventually(lambda: len(children_of(triton.server_pid)) == 1, "an idle one to end")

        client.unload_model("llm")
        eventually(lambda: orchestrator.status("/health/ready") == 503, "ready to turn 503")
        client.load_model("llm")
        eventually(lambda: orchestrator.status("/health/ready") == 200, "ready to return")
        assert generates(stack)
