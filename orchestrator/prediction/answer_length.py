"""Predicts the distribution of answer lengths from facts about the request.

Lengths are counted in bins whose width grows with the length. For each bin a node counts the
answers that reached it and the answers that ended in it. An answer that was cut by a deadline or a
cancel counts up to there (the life table, or Kaplan and Meier's estimator in discrete time). The
share that ended in a bin is its *hazard*. The hazards beyond n give the length after n tokens.

Nodes form chains, each node narrower than the one before::

    any answer ─▶ model ─▶ tenant ┬▶ stated cap ─▶ stated deadline
                                  └▶ instructions ┬▶ prompt length
                                                  ├▶ first word ─▶ opening words
                                                  └▶ session

Each node is shrunk towards its parent with the weight of ``PRIOR`` answers: a node with few answers
of its own predicts almost what its parent predicts. Instructions and opening words are keyed hashes
(``tasks.prompt_kind``): this module sees no text.

The prediction is a weighted mixture of the chains. A chain's weight follows from the chance that it
gave the observed answers, relative to the other chains that knew an equally narrow kind (Bayes'
rule over specialists; Freund et al. 1997). Weights leak between chains, so that a chain that
becomes informative soon gains weight. An uninformative chain has little weight and costs little.
"""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orchestrator.prediction.forecast import DRAWS, Floats
from orchestrator.tasks.prompt_kind import ANY_KIND, PromptKind

_EDGES = sorted({*range(1, 17), *(round(16 * 2 ** (i / 4)) for i in range(1, 57))})
"""The last length of each bin: up to 256 Ki tokens, a quarter of an octave each."""
LONGEST = _EDGES[-1]
_BOUNDS = np.array([0.0, *_EDGES])
_LASTING = 1 - (np.arange(DRAWS) + 0.5) / DRAWS
"""Shares of answers that are longer than each of the quantiles."""
PRIOR = 6.0
"""Weight of a kind's prior, in answers or outcomes."""
FIRST_MEAN = 128.0
"""Mean length, in tokens, of an answer if nothing is known."""
HALF_LIFE = 192
"""Number of later answers after which an answer has half its weight."""
_KEPT = 0.5 ** (1 / HALF_LIFE)
_MAX_NODES = 4096
"""Maximum number of kinds of answers: 9 MB including ``_NODE_BYTES``."""
_MAX_AT_HAND = 1024
"""Maximum number of cached curves, by key and by node, and of one curve's quantiles. A plan needs
all waiting and running requests: a queue of 100 by default, and 16 instances of 16 rows."""
_NODE_BYTES = 1024
"""Memory of a node without its counts but with its name, as ``tracemalloc`` measures it."""
_LEAK = 0.01
"""Share of a chain's weight that leaks to the other chains with each answer."""
_MIN_CHANCE = 1e-6
"""Minimum chance that a chain assigns to a length, so that one surprise does not silence it for
long. In the simulator 0.997 were met without it."""
Link = tuple[object, ...]


def _octave(value: float, parts: int) -> int:
    return round(parts * math.log2(max(1.0, value)))


class LengthKey(NamedTuple):
    """The facts that an answer's length depends on. ``deadline_ms`` is None if none was stated,
    ``prompt_tokens`` if unknown."""

    model: str
    tenant: str
    cap: int
    deadline_ms: float | None = None
    session: str = ""
    prompt_tokens: int | None = None
    kind: PromptKind = ANY_KIND

    def chains(self) -> list[list[Link]]:
        """Names of the nodes, widest first, by chain: always in the same order. A chain
        without its own data is short."""
        tenant: list[Link] = [(self.model,), (self.model, self.tenant)]
        stated = [*tenant, (*tenant[-1], _octave(self.cap, 1))]
        if self.deadline_ms is not None:
            stated.append((*stated[-1], _octave(self.deadline_ms, 2)))
        instructed = [*tenant, (*tenant[-1], "instructions", self.kind.instructions)]
        by_length, by_opening, by_session = (list(instructed) for _ in range(3))
        if self.prompt_tokens:
            by_length.append((*instructed[-1], "prompt", _octave(self.prompt_tokens, 2)))
        by_opening += [(*instructed[-1], "opening", part) for part in self.kind.opening]
        if self.session:
            by_session.append((*tenant[-1], "session", self.session))
        return [stated, by_length, by_opening, by_session]


CHAINS = len(LengthKey("", "", 1).chains())
_EQUAL = np.full(CHAINS, 1 / CHAINS)


def _lasting(hazards: Floats) -> Floats:
    """The shares of answers that are longer than each of the ``_BOUNDS``; the first is 1."""
    return np.concatenate(([1.0], np.cumprod(1 - hazards)))


def _bin_of(tokens: int) -> int:
    return min(bisect_left(_EDGES, tokens), len(_EDGES) - 1)


class LengthCurve:
    """The distribution of one answer's length; immutable."""

    __slots__ = ("_known", "_lasting")

    def __init__(self, lasting: Floats) -> None:
        """``lasting`` are the shares of answers that are longer than each of the ``_BOUNDS``."""
        self._lasting = lasting
        self._known: dict[tuple[int, int], tuple[float, ...]] = {}

    def left(self, made: int, cap: int) -> tuple[float, ...]:
        """Remaining tokens after ``made``, as equally likely quantiles in rising order.

        No quantile exceeds ``cap`` − ``made``. For a long answer ``made`` is rounded down a little.
        """
        if made > 16:
            made -= made % (made.bit_length() - 3)
        known = self._known.get((made, cap))
        if known is None:
            if len(self._known) >= _MAX_AT_HAND:
                self._known.clear()
            known = self._known[made, cap] = self._left(made, cap)
        return known

    @property
    def known_bytes(self) -> int:
        """Memory of the cached quantiles: a float takes 24 bytes and its pointer 8."""
        return len(self._known) * 32 * DRAWS

    def _left(self, made: int, cap: int) -> tuple[float, ...]:
        alive = np.interp(made, _BOUNDS, self._lasting)
        longer = np.interp(-alive * _LASTING, -self._lasting, _BOUNDS, right=math.inf)
        found: list[float] = np.clip(longer - made, 1.0, max(1.0, cap - made)).tolist()
        return tuple(found)


class _Node:
    """Answers of one kind, counted by bin."""

    def __init__(self) -> None:
        self._counts = np.zeros((2, len(_EDGES)))
        self.ended, self.reached = self._counts
        self.answers = 0
        self.weights = _EQUAL
        """Weights of the chains, if the node is of a model or a tenant."""

    def add(self, tokens: int, *, finished: bool) -> None:
        self.answers += 1
        last = _bin_of(tokens)
        self._counts *= _KEPT
        self.reached[: last + finished] += 1.0
        if finished:
            self.ended[last] += 1.0

    def weigh(self, heard: list[int], chances: list[float]) -> None:
        """Update the weights of the ``heard`` chains by the ``chances`` that they gave an answer.

        Bayes' rule redistributes their total weight among them. Then all weights move a little
        towards their mean.
        """
        weights = self.weights.copy()
        products = weights[heard] * chances
        weights[heard] = products * (weights[heard].sum() / products.sum())
        self.weights = (1 - _LEAK) * weights + _LEAK / CHAINS

    def hazards(self, prior: Floats) -> Floats:
        """Hazards by bin, shrunk towards ``prior``."""
        found: Floats = (self.ended + PRIOR * prior) / (self.reached + PRIOR)
        return found

    def is_news(self, answers_then: int) -> bool:
        """Whether the answers since ``answers_then`` are enough to move a length from one quantile
        to another."""
        return self.answers - answers_then > min(answers_then, HALF_LIFE) // DRAWS


_FIRST_HAZARDS: Floats = 1 - (1 - 1 / FIRST_MEAN) ** np.diff(_BOUNDS)
"""Hazards of each bin if every next token is as likely to be the last one."""


class _Mixed(NamedTuple):
    """A curve and its inputs."""

    seen: tuple[int, ...]
    """The number of answers of each node when the curve was made."""
    chains: tuple[Floats | None, ...]
    """Survival shares by chain; None if a chain is no narrower than an earlier one."""
    curve: LengthCurve


class AnswerLengths:
    """Learns curves from answers. Bounded: the kinds least recently used are dropped."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[Link, _Node] = OrderedDict()
        self._mixed: dict[tuple[Link, ...], _Mixed] = {}
        self._asked: dict[LengthKey, LengthCurve] = {}
        """Curves by key, cached until the next answer: every plan needs them."""

    def __len__(self) -> int:
        """The number of known kinds of answers."""
        return len(self._nodes)

    @property
    def total_bytes(self) -> int:
        """Approximate memory in bytes: counts and hazards of each kind, and curves."""
        row = _BOUNDS.nbytes
        curves = sum((CHAINS + 2) * row + mixed.curve.known_bytes for mixed in self._mixed.values())
        return len(self) * (2 * row + _NODE_BYTES) + curves

    def answered(self, key: LengthKey, tokens: int, *, finished: bool) -> None:
        """Learn from an answer that ended after ``tokens``; if not ``finished``, it was cut there.

        An answer that ended because it reached the stated cap counts as cut.
        """
        chains = key.chains()
        self._weigh(chains, tokens, finished=finished)
        self._asked.clear()
        for link in dict.fromkeys(_links(chains)):
            node = self._nodes.get(link)
            if node is None:
                node = self._nodes[link] = self._new_node(link)
            self._nodes.move_to_end(link)
            node.add(tokens, finished=finished)
        while len(self._nodes) > _MAX_NODES:
            self._nodes.popitem(last=False)

    def curve(self, key: LengthKey) -> LengthCurve:
        curve = self._asked.get(key)
        if curve is None:
            if len(self._asked) >= _MAX_AT_HAND:
                self._asked.clear()
            curve = self._asked[key] = self._mix(key.chains()).curve
        return curve

    def _new_node(self, link: Link) -> _Node:
        """A new node. A tenant's chains start with the model's weights."""
        node = _Node()
        model = self._nodes.get(link[:1])
        if len(link) == 2 and model is not None:
            node.weights = model.weights
        return node

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    def _weigh(self, chains: list[list[Link]], tokens: int, *, finished: bool) -> None:
        """Update the chains' weights by the chance that each gave this answer."""
        said = self._mix(chains, takes_stale=True).chains
        heard = [number for number, lasting in enumerate(said) if lasting is not None]
        if len(heard) < 2:
            return
        at = _bin_of(tokens)
        chances = [
            max(_MIN_CHANCE, float(lasting[at] - lasting[at + 1] if finished else lasting[at]))
            for lasting in said
            if lasting is not None
        ]
        for link in chains[0][:2]:
            if (node := self._nodes.get(link)) is not None:
                node.weigh(heard, chances)

    def _mix(self, chains: list[list[Link]], *, takes_stale: bool = False) -> _Mixed:
        """The mixture of the chains' curves, recomputed after enough new answers."""
        nodes = self._nodes
        known = [[link for link in chain if link in nodes] for chain in chains]
        links = tuple(dict.fromkeys(_links(known)))
        mixed = self._mixed.get(links)
        if mixed is not None and (
            takes_stale
            or not any(
                nodes[link].is_news(then) for link, then in zip(links, mixed.seen, strict=True)
            )
        ):
            return mixed
        said: list[Floats | None] = []
        told: set[Link] = set()
        for chain in known:
            hazards = _FIRST_HAZARDS
            for link in chain:
                hazards = nodes[link].hazards(hazards)
            # A chain that ends with a node of an earlier chain adds nothing.
            says_more = not said or chain[-1] not in told
            told.update(chain)
            said.append(_lasting(hazards) if says_more else None)
            if not chain:
                break
        tenant = nodes.get(chains[0][1])
        weights = _EQUAL if tenant is None else tenant.weights
        if len(self._mixed) >= _MAX_AT_HAND:
            self._mixed.clear()
        own = [(weight, one) for weight, one in zip(weights, said, strict=False) if one is not None]
        shares, lasting = zip(*own, strict=True)
        curve = LengthCurve(np.average(lasting, axis=0, weights=shares))
        seen = tuple([nodes[link].answers for link in links])
        mixed = self._mixed[links] = _Mixed(seen, tuple(said), curve)
        return mixed


def _links(chains: Sequence[Sequence[Link]]) -> Iterator[Link]:
    return (link for chain in chains for link in chain)


STATED = LengthCurve(np.ones(len(_BOUNDS)))
"""The curve of an answer that uses its whole cap."""
