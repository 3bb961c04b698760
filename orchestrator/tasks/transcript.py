"""What a task has generated, kept so that another instance can go on from there (OR-10)."""

from worker.protocol import Delta


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
