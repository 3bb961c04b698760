"""Many cases in one test, where what costs is the service that each would start again, or the test
itself: each is collected by every process, set up, reported and sent around for 10 ms of CPU."""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Test = Callable[..., Awaitable[None] | None]


def for_each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """As ``pytest.mark.parametrize``, but with the same fixtures for all: only for cases that leave
    nothing behind. A failure names its case."""
    keys = (names,) if isinstance(names, str) else names
    listed = [(case,) if isinstance(names, str) else tuple(case) for case in cases]

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        fixtures = [one for one in signature.parameters.values() if one.name not in keys]
        assert len(fixtures) == len(signature.parameters) - len(keys), (
            "a name that it does not take"
        )

        async def all_of_them(**given: Any) -> None:
            for case in listed:
                with _named(case):
                    await test(**given, **dict(zip(keys, case, strict=True)))  # type: ignore[misc]

        def all_at_once(**given: Any) -> None:
            for case in listed:
                with _named(case):
                    test(**given, **dict(zip(keys, case, strict=True)))

        whole: Test = all_of_them if inspect.iscoroutinefunction(test) else all_at_once
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(whole, name, getattr(test, name))
        whole.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return whole

    return decorate


@contextmanager
def _named(case: object) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {case!r:.1000}")
        raise
