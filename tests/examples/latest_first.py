"""An order of the queue: who can wait longest goes first, of whatever class."""

from orchestrator.queue.order import Place, Tier, Waiting


class LatestFirst:
    """See ``Order``."""

    makes_room = True

    def place_of(self, task: Waiting) -> Place:
        return Place(Tier.INTERACTIVE, task.tenant, -task.deadline.at)
