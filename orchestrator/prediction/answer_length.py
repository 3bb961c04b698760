"""Predicts the length of answers: a distribution, by what it depends on.

Lengths fall into bins that grow with the length. For each bin a node keeps how many answers reached
it and how many ended in it, so that one cut by a deadline or a cancel counts for as far as it got
(the life table, or Kaplan and Meier's estimator in discrete time). The share that ended is the
bin's *hazard*; how long an answer of n tokens will still be follows from the hazards beyond n.

Nodes form chains, each node narrower than the one before::

    any answer ─▶ model ─▶ tenant ┬▶ stated cap ─▶ stated deadline
                                  └▶ instructions ┬▶ prompt length
                                                  ├▶ first word ─▶ opening words
                                                  └▶ session

and each is drawn towards the one before it with the weight of ``PRIOR`` answers: a node with few
answers of its own says what its parent says. Instructions and opening words are keyed hashes
(``tasks.prompt_kind``): no text gets in here.

What the chains say of an answer is mixed. A chain's weight is how probable it held the answers that
came, against the other chains that knew as narrow a kind then (Bayes' rule over specialists; Freund
et al. 1997); weights leak towards each other, so that a chain whose kinds begin to tell something
is soon heard. Where a kind of prompt says nothing, its chain's weight, and what it costs, is small.
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
"""Weight, in answers or outcomes, of what is believed of a kind before it has any of its own."""
_FIRST_MEAN = 128.0
"""Mean length, in tokens, of an answer of which nothing is known."""
HALF_LIFE = 192
"""Number of later answers after which an answer counts half."""
_KEPT = 0.5 ** (1 / HALF_LIFE)
_MAX_NODES = 4096
"""Most kinds of answers: with ``_NODE_BYTES`` 9 MB."""
_MAX_AT_HAND = 1024
"""Curves at hand, by key and by node, and quantiles of one. A plan asks for those of all that waits
and runs: a queue of 100 by default, and what 16 instances of 16 rows run."""
_NODE_BYTES = 1024
"""Memory of a node besides its counts, its name among it, as ``tracemalloc`` counts it."""
_LEAK = 0.01
"""Part of a chain's weight that leaks to the others with each answer."""
_MIN_CHANCE = 1e-6
"""Least chance that a chain may give a length: one surprise does not silence it for long. In the
simulator 0.997 were met without it."""
CHAINS = 4
Link = tuple[object, ...]
_EQUAL = np.full(CHAINS, 1 / CHAINS)


class LengthKey(NamedTuple):
    """The facts that an answer's length depends on. ``deadline_ms`` is None if none was stated,
    ``prompt_tokens`` 0 if unknown."""

    model: str
    tenant: str
    cap: int
    deadline_ms: float | None = None
    session: str = ""
    prompt_tokens: int = 0
    kind: PromptKind = ANY_KIND

    def chains(self) -> list[list[Link]]:
        """Names of the nodes, the widest first; always ``CHAINS`` chains, in the same order. A
        chain without data of its own is short."""
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
        """Tokens still to come after ``made``, as equally likely quantiles in rising order.

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
        """Memory of the quantiles at hand: a float takes 24 bytes and its place 8."""
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
        """Move the weights of the ``heard`` chains after an answer that they had given these
        chances.

        Bayes' rule moves their shares of the weight that they have together; then all weights move
        a little towards their mean.
        """
        weights = self.weights.copy()
        products = weights[heard] * chances
        weights[heard] = products * (weights[heard].sum() / products.sum())
        self.weights = (1 - _LEAK) * weights + _LEAK / CHAINS

    def hazards(self, prior: Floats) -> Floats:
        """Hazards by bin, drawn towards ``prior``."""
        found: Floats = (self.ended + PRIOR * prior) / (self.reached + PRIOR)
        return found

    def is_news(self, answers_then: int) -> bool:
        """Whether enough answers have come since there were ``answers_then`` to move a length
        from one quantile to another."""
        return self.answers - answers_then > min(answers_then, HALF_LIFE) // DRAWS


_FIRST_HAZARDS: Floats = 1 - (1 - 1 / _FIRST_MEAN) ** np.diff(_BOUNDS)
"""Hazards of each bin if every next token is as likely to be the last one."""


class _Mixed(NamedTuple):
    """A curve, and what it was made of."""

    seen: tuple[int, ...]
    """The number of answers of each node when the curve was made."""
    chains: tuple[Floats | None, ...]
    """Shares of answers that last, by chain; None if a chain is no narrower than an earlier one."""
    curve: LengthCurve


class AnswerLengths:
    """Learns curves from answers. Bounded: the kinds least recently used are dropped."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[Link, _Node] = OrderedDict()
        self._mixed: dict[tuple[Link, ...], _Mixed] = {}
        self._asked: dict[LengthKey, LengthCurve] = {}
        """Curves by key, kept until the next answer: every plan asks for them."""

    def __len__(self) -> int:
        """How many kinds of answers it knows."""
        return len(self._nodes)

    @property
    def total_bytes(self) -> int:
        """Memory of what it knows, approximately: counts and hazards of each kind, and curves."""
        row = _BOUNDS.nbytes
        curves = sum((CHAINS + 2) * row + mixed.curve.known_bytes for mixed in self._mixed.values())
        return len(self) * (2 * row + _NODE_BYTES) + curves

    def answered(self, key: LengthKey, tokens: int, *, finished: bool) -> None:
        """Learn from an answer that ended after ``tokens``, or was cut there if not ``finished``.

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
        """A new node. A tenant's chains begin with the weights that they have for the model."""
        node = _Node()
        model = self._nodes.get(link[:1])
        if len(link) == 2 and model is not None:
            node.weights = model.weights
        return node

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    def _weigh(self, chains: list[list[Link]], tokens: int, *, finished: bool) -> None:
        """Move the chains' weights by the chance that each had given this answer."""
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
        """The chains' curves combined, made again once enough answers have come."""
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
            # A chain that ends with a node of an earlier chain says nothing more.
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
"""The curve of an answer that takes all of its cap."""


def _octave(value: float, parts: int) -> int:
    return round(parts * math.log2(max(1.0, value)))
