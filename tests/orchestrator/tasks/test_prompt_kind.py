"""What kind of prompt a task has: hashes that tell kinds apart and say nothing else."""

import pytest

from orchestrator.tasks.job import Chat, Message, Prompt, Tool
from orchestrator.tasks.prompt_kind import PromptKind, kind_of
from tests.support.cases import for_each


def chat(*turns: tuple[str, str], tools: tuple[Tool, ...] = ()) -> Chat:
    return Chat(tuple(Message(role, text) for role, text in turns), tools=tools)


SYSTEM = ("system", "You are terse.")
ASKS = ("user", "Tell me a story about Ada.")


@for_each(
    ("one", "other", "shares_instructions", "shares_opening"),
    [
        (chat(SYSTEM, ASKS), chat(SYSTEM, ASKS), True, True),
        (chat(SYSTEM, ASKS), chat(SYSTEM, ("user", "tell  me A story of Eve")), True, True),
        (chat(SYSTEM, ASKS), chat(SYSTEM, ("user", "Hi"), ("assistant", "Hi!"), ASKS), True, True),
        (chat(SYSTEM, ASKS), chat(SYSTEM, ("user", "What is Ada?")), True, False),
        (chat(SYSTEM, ASKS), chat(("system", "You are wordy."), ASKS), False, True),
        (chat(SYSTEM, ASKS), chat(ASKS), False, True),
        (chat(SYSTEM, ASKS), chat(SYSTEM, ASKS, tools=(Tool("add"),)), False, True),
        (chat(ASKS), chat(ASKS).messages, True, True),
        ("Once upon a time", "Once upon a day", True, True),
        (tuple(range(40)), (7, *range(1, 17), *range(90, 120)), True, True),
        (tuple(range(40)), tuple(range(5, 45)), False, False),
        (tuple(range(12)), (7, *range(1, 5), 90), True, True),
    ],
)
def test_prompts_of_one_kind_begin_alike(
    one: Prompt, other: Prompt, shares_instructions: bool, shares_opening: bool
) -> None:
    kinds = [kind_of(prompt) for prompt in (one, other)]
    assert (kinds[0].instructions == kinds[1].instructions) is shares_instructions
    assert (kinds[0].opening == kinds[1].opening) is shares_opening


def test_a_kind_is_short_and_has_no_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of eight bytes, which another process's key makes others."""
    secret = chat(("system", "secret " * 5000), ("user", "secret " * 5000))

    def flat(kind: PromptKind) -> bytes:
        return b"".join((kind.instructions, *kind.opening))

    mine = flat(kind_of(secret))
    assert len(mine) == 24 and b"secret" not in mine
    monkeypatch.setattr("orchestrator.tasks.prompt_kind._KEY", b"another process's")
    assert flat(kind_of(secret)) != mine
