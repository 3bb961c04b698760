"""What a task has generated, kept so that another instance can go on from there (OR-10)."""

from worker.protocol import Delta, Sampling


class Trail:
    """Ids in order, and the text that came with them."""

    __slots__ = ("_texts", "ids")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._texts: list[str] = []

    def add(self, delta: Delta) -> None:
        self.ids.extend(delta.ids)
        self._texts.extend(delta.texts)

    def text(self) -> str:
        return "".join(self._texts)


def is_continuable(sampling: Sampling) -> bool:
    """Whether what is drawn next depends on nothing but the text, its length and the seed."""
    return (
        (sampling.temperature == 0 or sampling.seed is not None)
        and not sampling.stop
        and sampling.logprobs is None
        and sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
    )
