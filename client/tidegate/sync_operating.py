"""Operating a service from plain code: what ``SyncClient.operating`` offers."""

from collections.abc import Callable, Mapping

from tidegate.deadlines import Deadline
from tidegate.listings import Instance, SwapState
from tidegate.operating import DrainState, Operating, Reloaded
from tidegate.sync_sessions import Runs


class SyncOperating:
    """``Operating`` for plain code."""

    def __init__(self, loop: Runs, operating: Operating) -> None:
        self._loop = loop
        self._operating = operating

    def drain(self, grace: Deadline | None = None) -> DrainState:
        """Have the orchestrator refuse new work, and finish what runs (``Operating.drain``)."""
        return self._loop.run(lambda: self._operating.drain(grace))

    def drain_state(self) -> DrainState:
        """How far the orchestrator's drain is (``Operating.drain_state``)."""
        return self._loop.run(self._operating.drain_state)

    def undrain(self) -> DrainState:
        """Have the orchestrator take new work again (``Operating.undrain``)."""
        return self._loop.run(self._operating.undrain)

    def drain_instance(self, address: str, grace: Deadline | None = None) -> Instance:
        """Give an instance no new work, and move what outlasts ``grace``
        (``Operating.drain_instance``)."""
        return self._loop.run(lambda: self._operating.drain_instance(address, grace))

    def undrain_instance(self, address: str) -> Instance:
        """Give an instance new work again (``Operating.undrain_instance``)."""
        return self._loop.run(lambda: self._operating.undrain_instance(address))

    def swap(
        self,
        address: str,
        model: str = "",
        *,
        name: str = "",
        settings: Mapping[str, str] | None = None,
        grace: Deadline | None = None,
        wait: bool = True,
        back: bool = False,
    ) -> SwapState:
        """Have an instance serve another model (``Operating.swap``)."""
        return self._loop.run(
            lambda: self._operating.swap(
                address, model, name=name, settings=settings, grace=grace, wait=wait, back=back
            )
        )

    def reload_instance(
        self, address: str, *, grace: Deadline | None = None, wait: bool = True
    ) -> SwapState:
        """Have an instance load its model's files anew (``Operating.reload_instance``)."""
        return self._loop.run(
            lambda: self._operating.reload_instance(address, grace=grace, wait=wait)
        )

    def swap_all(
        self,
        model: str,
        *,
        name: str = "",
        settings: Mapping[str, str] | None = None,
        grace: Deadline | None = None,
        on_swap: Callable[[SwapState], None] = lambda state: None,
    ) -> tuple[SwapState, ...]:
        """Have all instances serve another model, one after the other (``Operating.swap_all``);
        ``on_swap`` is called on the client's own thread."""
        return self._loop.run(
            lambda: self._operating.swap_all(
                model, name=name, settings=settings, grace=grace, on_swap=on_swap
            )
        )

    def reload(self) -> Reloaded:
        """Have the orchestrator read settings and keys anew (``Operating.reload``)."""
        return self._loop.run(self._operating.reload)
