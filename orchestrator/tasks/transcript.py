"""A task's tokens and text so far: for replay, non-streamed answers, and retries elsewhere."""

from dataclasses import dataclass, field

from protocol import Delta, TokenLogprob

TASK_BYTES = 3072
TOKEN_BYTES = 104
LOGPROB_BYTES = 136
TOP_LOGPROB_BYTES = 118
"""Memory in bytes of a kept task, of each token, of a token's log-probability, and of each
alternative (tracemalloc, CPython 3.11, ids above 256, texts of 8 characters). A token with the 20
most likely alternatives takes 2.6 KB, 25 times as much as without."""


@dataclass(slots=True, eq=False, repr=False)
class Transcript:
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    keeps_logprobs: bool = True
    """Whether log-probabilities are kept; a text can continue on another instance without them."""

    def text(self) -> str:
        return "".join(self.texts)

    @property
    def cumulative_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs)

    @property
    def kept_bytes(self) -> int:
        tops = len(self.logprobs[0].top) if self.logprobs else 0
        return TOKEN_BYTES * len(self.ids) + len(self.logprobs) * (
            LOGPROB_BYTES + TOP_LOGPROB_BYTES * tops
        )

    def started(self, task: object) -> None:
        """Do nothing: the start is not kept."""

    def tokens(self, task: object, delta: Delta) -> None:
        self.ids.extend(delta.ids)
        self.texts.extend(delta.texts)
        if delta.logprobs is not None and self.keeps_logprobs:
            self.logprobs.extend(delta.logprobs)

    def ended(self, task: object) -> None:
        """Do nothing: the ending is the task's."""
