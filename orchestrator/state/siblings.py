"""Processes that share one port of this machine, as members of the fleet that they are."""

import hashlib
import os

from orchestrator.clock import this_boot
from orchestrator.state.members import Members


class Siblings:
    """The other processes at this one's port. Exactly one of all is the leader: it keeps files and
    batches."""

    def __init__(self, members: Members, group: str, name: str) -> None:
        """``group`` is the same for all of a port; ``name`` is this process's own address."""
        self.name = name
        self._members = members
        self._group = members.group = group

    def urls(self) -> list[str]:
        """Where each of the others is reached, as of the last renewal."""
        return sorted({url for url, _ in self._others()})

    def take_lead(self) -> None:
        """Tell the others that this process keeps files and batches from now on."""
        self._members.leads_since = self._members.store_time()

    def lead(self) -> str | None:
        """Where the process is reached that leads; empty for this one, None while nobody does."""
        if self._members.leads_since:
            return ""
        # One that was killed counts as alive until its lease is over: its successor is later.
        leads = [(since, url) for url, since in self._others() if since]
        return max(leads)[1] if leads else None

    def keeper_of(self, name: str) -> str:
        """Where the process is reached that keeps a client's own name for a submission; empty for
        this one. The same at all of them (rendezvous hashing), while they see each other."""

        def weight(url: str) -> bytes:
            return hashlib.sha256(f"{url} {name}".encode()).digest()

        mine = self._members.url
        keeper = max([mine, *self.urls()], key=weight)
        return "" if keeper == mine else keeper

    def _others(self) -> list[tuple[str, float]]:
        """Address of each, and since when it leads. A process whose place this one has taken had
        the same address."""
        others = [seen.member for seen in self._members.others.values() if seen.is_alive]
        return [
            (one.url, one.leads_since)
            for one in others
            if one.group == self._group and one.url != self._members.url
        ]


def group_of(host: str, port: int) -> str:
    """A name for the processes at a port of this machine, or of this container."""
    network = os.readlink("/proc/self/ns/net")
    place = f"{this_boot().id} {network} {host} {port}"
    return hashlib.sha256(place.encode()).hexdigest()[:16]
