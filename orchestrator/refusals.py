"""What admission judged infeasible, and how often that was wrong (DL-7)."""

_SMOOTHING = 0.01


class Refusals:
    """What was judged infeasible, what became of the sample of it that was let through."""

    def __init__(self) -> None:
        self.judged = 0
        self.refused = 0
        self.samples_met = 0
        self.samples_lost = 0
        self.recent_share = 0.0
        """Of what was offered of late."""

    @property
    def false_rate(self) -> float:
        """Share of sampled would-be refusals whose deadline was kept after all; 0 without any."""
        samples = self.samples_met + self.samples_lost
        return self.samples_met / samples if samples else 0.0

    def offered(self, *, refused: bool) -> None:
        self.refused += refused
        self.recent_share += _SMOOTHING * (refused - self.recent_share)

    def refused_late(self) -> None:
        """One that was let in, and counted as such, has to go after all."""
        self.refused += 1
        self.recent_share = min(1.0, self.recent_share + _SMOOTHING)

    def sample_ended(self, *, met: bool) -> None:
        """A task with ``probe`` set ended for another reason than its client's wish."""
        self.samples_met += met
        self.samples_lost += not met
