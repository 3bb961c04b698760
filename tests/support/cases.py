"""Many cases in one test, where what costs is the service that each would start anew."""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

Test = Callable[..., Awaitable[None]]


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
                try:
                    await test(**given, **dict(zip(keys, case, strict=True)))
                except BaseException as error:
                    error.add_note(f"in the case {case!r:.1000}")
                    raise

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(all_of_them, name, getattr(test, name))
        all_of_them.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return all_of_them

    return decorate
