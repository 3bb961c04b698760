"""Steps on torch's ``meta`` device in place of a GPU: what reads its tensors (``item``,
``nonzero``, a copy to the host) raises, and code takes the branches for other devices than the
CPU."""

from traceback import walk_stack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protocol import Sampling
from tests.worker.engine.test_torch_engine import FAR
from worker.core import Job
from worker.grammar.constraint import Constraint
from worker.runner.cuda_graphs import GraphRecording, Step
from worker.runner.cuda_runner import LaunchedOnDevice, build_cuda_runner
from worker.runner.forward import BatchForward
from worker.runner.torch_runner import SlotLimits
from worker.sampling.sampler import Sampler
from worker.scheduler.plan import Plan, Row
from worker.scheduler.request import PENDING, Request

META = torch.device("meta")


class Blank:
    """A model and its attention."""

    head = torch.empty(8, 50, device=META)

    def prepare(self, *given: object) -> Any:
        return self

    decode_step = prepare

    def forward(self, ids: torch.Tensor, *given: object) -> torch.Tensor:
        return self.head.new_empty(len(ids), 8)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mm(self.head)


class Watch(TorchDispatchMode):
    """Notes waits, replays and launches outside them; fails for what would wait only on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []
        self.number: object = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        from_host = any(isinstance(one, torch.Tensor) and one.is_cpu for one in args)
        if from_host or name == "detach_":  # which ``torch.tensor`` calls
            files = [frame.f_code.co_filename for frame, _ in walk_stack(None)]
            assert any(file.endswith("worker/pinned.py") for file in files), "memory is not pinned"
        assert not from_host or args[0].is_contiguous(), "a copy takes memory on the device"
        assert name != "index_put_" or args[2] is not self.number, "on CUDA, its copy waits"
        if not func.is_view or (name == "to" and from_host):
            self.noted.append(name)
        found = func(*args, **kwargs or {})
        if name == "scalar_tensor":
            self.number = found
        return found

    def record(self, call: Step) -> GraphRecording:
        return GraphRecording(lambda: self.noted.append("replay"), call())


def steps_of(recorded: bool, masked: int | None = None, **way: Any) -> list[list[str]]:
    """What was noted in a step of two prompts, in one of a decode and a prompt's rest, and in one
    of two decodes, launched ahead. Request ``masked`` has a grammar."""
    watch, forward = Watch(), BatchForward(Blank(), Blank())  # type: ignore[arg-type]
    sampler = Sampler((2,), META, slots=2, vocab_size=50, max_tokens=64)
    limits = SlotLimits(16, 2, 4)
    runner = build_cuda_runner(forward, sampler, limits, device=META, recorder=watch, dummy_block=8)
    if not recorded:
        runner._graphs = None
    requests = []
    for slot in range(2):
        constraint = Constraint() if slot == masked else None
        job = Job([7] * 20, Sampling(30, **way), FAR, constraint=constraint)
        requests.append(Request(job, submitted_at=0.0, own_seed=slot))
        requests[slot].slot, requests[slot].blocks = slot, [2 * slot, 2 * slot + 1]
    a, b = requests

    def tokens(step: LaunchedOnDevice) -> dict[Request, int]:
        watch.noted.append("wait")
        return {a: 5, b: 6}

    found = []
    with pytest.MonkeyPatch.context() as patch, watch:
        patch.setattr(LaunchedOnDevice, "tokens", tokens)
        for decodes, rows in enumerate(
            (
                [Row(a, 0, 20, True), Row(b, 0, 12, False)],
                [Row(a, 20, 1, True), Row(b, 12, 8, True)],
                [Row(a, 21, 1, True), Row(b, 20, 1, True)],
            )
        ):
            runner.launch(Plan(rows, decodes, sum(row.count for row in rows)))
            found.append(watch.noted)
            watch.noted = []
            for row in rows:
                row.request.tokens += [PENDING] * row.samples
    return found


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.9, "logprobs": 2},
    {"repetition_penalty": 1.3, "logit_bias": ((7, 3.0),), "prompt_logprobs": 1},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": (4,)},
]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_launched_without_waiting(way: dict[str, Any], recorded: bool) -> None:
    """LB-7: draws, log-probabilities, penalties, scores of prompts, barred tokens."""
    steps = steps_of(recorded, **way)
    assert all("wait" not in noted for noted in steps)
    assert [noted.count("replay") > 0 for noted in steps] == [False, False, recorded]


def test_a_plain_decode_is_a_few_copies_and_replays() -> None:
    """Inputs; layers and head; chances; draw; the tokens' way back. Nothing else, so nothing takes
    memory on the device."""
    *_, decodes = steps_of(True, temperature=0.9)
    assert decodes == ["copy_", "replay", "copy_", "replay", "clone"]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_step_waits_for_masks_only_where_a_text_needs_it(recorded: bool) -> None:
    """The forward pass is launched first. A first token's mask needs no other step."""
    first, *later = steps_of(recorded, 0, temperature=0.0)
    assert "wait" not in first and "index_copy_" in first
    for noted, forward in zip(later, ("mm", "replay" if recorded else "mm"), strict=True):
        before, after = noted[: noted.index("wait")], noted[noted.index("wait") + 1 :]
        assert forward in before and not {forward, "wait"} & set(after) and "index_copy_" in after
    first, mixed, decodes = steps_of(recorded, 1, temperature=0.0)
    assert "wait" not in first + mixed and "wait" in decodes
