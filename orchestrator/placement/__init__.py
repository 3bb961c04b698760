"""Which instance takes a task (OR-6 to OR-9), in the order of the data.

``choose`` is the pure function over ``Candidate``s, ``affinity`` remembers where conversations are
(and ``PrefixIndex`` where prompts are), and ``placer`` puts these together for the dispatcher,
under the operator's ``policy`` if there is one.
"""

from orchestrator.instances.candidate import Candidate, Need, Spec
from orchestrator.instances.prefix_index import PrefixIndex
from orchestrator.placement.affinity import Affinity
from orchestrator.placement.choose import feasible, place
from orchestrator.placement.placer import Choice, Placer

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
