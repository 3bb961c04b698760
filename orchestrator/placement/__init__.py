"""Which instance takes a task (OR-6 to OR-9), in the order of the data.

``candidates`` are what there is and what is asked, ``choose`` is the pure function over them,
``prefixes`` and ``affinity`` remember where prompts and conversations are, and ``placer`` puts
these together for the dispatcher, under the operator's policy if there is one.
"""

from orchestrator.placement.affinity import Affinity
from orchestrator.placement.candidates import Candidate, Need, Spec
from orchestrator.placement.choose import feasible, place
from orchestrator.placement.placer import Choice, Placer
from orchestrator.placement.prefixes import PrefixIndex

__all__ = [
    "Affinity",
    "Candidate",
    "Choice",
    "Need",
    "Placer",
    "PrefixIndex",
    "Spec",
    "feasible",
    "place",
]
