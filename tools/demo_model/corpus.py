"""Makes batches from the grammar: encoded documents, weights of tokens, two ways to form rows.

A sorted row holds one document, beside documents of about its length: the model then meets the
names of one story only and soon learns to look them up. A packed row holds documents that follow
each other, as they do when a client ignores the end of a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Final, NamedTuple

import torch
from tokenizers import Tokenizer

from tools.demo_model import dialogue, grammar, words
from tools.demo_model.tokenizer import BOS, END, END_OF_TEXT

# What the user types counts little: nobody needs the model to invent typos.
USER_WEIGHT: Final = 0.2
# A name, animal, thing or place that the document has mentioned before. Such tokens are one in
# twenty, and without the extra weight the fixed phrases around them win all of the attention.
LOOKED_UP_WEIGHT: Final = 4.0
_ENTITIES: Final = frozenset(
    words.GIRLS
    + words.BOYS
    + words.ANIMALS
    + words.WORKERS
    + words.GIRL_KINDS
    + words.BOY_KINDS
    + words.THINGS
    + words.COLORS
    + tuple(place for place, _ in words.PLACES)
)
_SORTED_DOCUMENTS: Final = 128
_BATCH_TOKENS: Final = 1600
_LONGEST_ROW: Final = 512


class Document(NamedTuple):
    """Token ids and how much each one counts as a target."""

    ids: list[int]
    weights: list[float]


class Batch(NamedTuple):
    """Inputs and targets [rows, length] int64, weights [rows, length] float32 (0 is padding)."""

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


class Corpus:
    """An endless source of documents and batches; the seed decides every one of them."""

    def __init__(self, tokenizer: Tokenizer, seed: str) -> None:
        self._tokenizer = tokenizer
        self._rng = Random(seed)
        self._entities = {
            ids[0]
            for word in _ENTITIES
            if len(ids := tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1
        }

    def document(self, drills: float) -> Document:
        """One document; `drills` is the share that are nothing but reading exercises."""
        rng, ids, weights = self._rng, list[int](), list[float]()

        def put(text: str, weight: float) -> None:
            # Pieces are encoded apart, as the special tokens of the chat template split the text
            # at serving time too.
            for token in self._tokenizer.encode(text, add_special_tokens=False).ids:
                looked_up = token in self._entities and token in ids
                ids.append(token)
                weights.append(weight * (LOOKED_UP_WEIGHT if looked_up else 1.0))

        if rng.random() < drills:
            put(BOS + grammar.exercise_document(rng) + END_OF_TEXT, 1.0)
        elif rng.random() < 0.4:
            opening = BOS if rng.random() < 0.7 else ""
            put(opening + grammar.plain_document(rng) + END_OF_TEXT, 1.0)
        else:
            put(BOS, 1.0)
            for turn in dialogue.chat(rng):
                put(f"<|{turn.role}|>", 1.0)
                put(turn.text, 1.0 if turn.role == "assistant" else USER_WEIGHT)
                put(END, 1.0)
        return Document(ids, weights)

    def sorted_batches(self, drills: float) -> Iterator[Batch]:
        """A few dozen batches of about 1600 tokens, one document per row."""
        documents = [self.document(drills) for _ in range(_SORTED_DOCUMENTS)]
        documents.sort(key=lambda each: len(each.ids))
        groups: list[list[Document]] = [[]]
        for each in documents:
            if (len(groups[-1]) + 1) * min(len(each.ids), _LONGEST_ROW) > _BATCH_TOKENS:
                groups.append([])
            groups[-1].append(each)
        groups = [group for group in groups if group]
        self._rng.shuffle(groups)
        for group in groups:
            yield _pad(group)

    def packed_batch(self, drills: float, rows: int, length: int) -> Batch:
        """Full rows; each begins at the beginning of a document."""
        packed = []
        for _ in range(rows):
            row = Document([], [])
            while len(row.ids) <= length:
                more = self.document(drills)
                row.ids.extend(more.ids)
                row.weights.extend(more.weights)
            packed.append(Document(row.ids[: length + 1], row.weights[: length + 1]))
        return _pad(packed, longest=length + 1)


def _pad(documents: list[Document], longest: int = _LONGEST_ROW) -> Batch:
    """Shift inputs against targets; rows are cut at `longest` and filled up with weight 0."""
    width = min(longest, max(len(each.ids) for each in documents))
    ids = torch.zeros(len(documents), width, dtype=torch.int64)
    weights = torch.zeros(len(documents), width)
    for row, each in enumerate(documents):
        size = min(width, len(each.ids))
        ids[row, :size] = torch.tensor(each.ids[:size])
        weights[row, :size] = torch.tensor(each.weights[:size])
    return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:])
