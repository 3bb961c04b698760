"""The models that instances serve, each with the encoder of its prompts."""

import asyncio
from collections import deque
from concurrent.futures import Executor

from orchestrator.errors import InvalidRequest, ModelNotFound, NotReady
from orchestrator.instances.instance import Instance
from orchestrator.instances.provenance import UNKNOWN, Provenance, provenance_of
from orchestrator.instances.registry import Registry
from orchestrator.prompts.encoder import PromptEncoder
from protocol import ModelCard

RECENT = 4
"""Number of encoders kept after their model was unloaded: creating one takes up to seconds."""


class ServedModels:
    """Finds the models that instances serve; instances with equal cards share one encoder."""

    def __init__(
        self, registry: Registry, executor: Executor, *, special_in_prompts: bool = False
    ) -> None:
        """Tokenizers are prepared on ``executor``: a large one takes seconds."""
        self._registry = registry
        self._executor = executor
        self._special_in_prompts = special_in_prompts
        self._provenance: dict[tuple[str, str, str], Provenance] = {}
        """Catalog entries by the card's fields that decide them, so that each is looked up once."""
        self._recent: deque[PromptEncoder] = deque(maxlen=RECENT)

    def by_name(self) -> dict[str, PromptEncoder]:
        """Encoders of all known models and their adapters, up or not, by name. The card of a ready
        instance is preferred, then the card of the engine that lacks the fewest features; placement
        finds a fitting instance."""
        known, adapted = self._known()
        return {**adapted, **known}

    def _known(self) -> tuple[dict[str, PromptEncoder], dict[str, PromptEncoder]]:
        known: dict[str, PromptEncoder] = {}
        adapted: dict[str, PromptEncoder] = {}
        for instance in sorted(self._registry, key=_preference):
            if instance.encoder is not None:
                known[instance.encoder.card.model] = instance.encoder
                adapted |= instance.encoder.adapted
        return known, adapted

    def resolve(self, model: str) -> PromptEncoder:
        """The encoder of the model ``model``, or of the only model if the name is empty. Raises
        ``NotReady`` while no instance has sent a usable card, or while an instance with an unknown
        model may serve it; ``InvalidRequest`` if no name is given and several models are served;
        otherwise ``ModelNotFound``."""
        known, adapted = self._known()
        if not known:
            faults = sorted({instance.fault for instance in self._registry if instance.fault})
            if faults:
                raise NotReady(f"no instance can serve: {'; '.join(faults)}")
            raise NotReady("no instance has been reached yet; try again in a moment")
        if not model and len(known) == 1:
            return next(iter(known.values()))
        if (found := known.get(model) or adapted.get(model)) is not None:
            return found
        names = ", ".join(sorted(known | adapted))
        if not model:
            raise InvalidRequest(
                f"model is required: several are served, name one: {names}", field="model"
            )
        silent = sorted(one.address for one in self._registry if not one.has_said)
        if silent:
            raise NotReady(
                f"the model {model[:128]!r} is not served yet, but may be after {len(silent)} more "
                f"instances report their models; available now: {names}"
            )
        raise ModelNotFound(
            f"the model {model[:128]!r} is not served here; available: {names}", field="model"
        )

    def encoder_of(self, card: ModelCard) -> PromptEncoder | None:
        """An encoder for an equal card, or one that reads prompts alike; None if there is none."""
        served = [i.encoder for i in self._registry if i.encoder is not None]
        for encoder in served:
            if encoder.card == card:
                return encoder
        # A model that is swapped in again, or into another instance.
        if _origin(card) in self._provenance:
            for encoder in [*served, *self._recent]:
                if encoder.reads_as(card):
                    return encoder.with_card(card)
        return None

    async def load(self, card: ModelCard) -> PromptEncoder:
        """Prepare a card's tokenizer and template. Raises ``BadCard``."""
        loop = asyncio.get_running_loop()
        encoder = await loop.run_in_executor(self._executor, self._make, card)
        self._recent.append(encoder)
        return encoder

    def provenance(self, card: ModelCard) -> Provenance:
        return self._provenance.get(_origin(card), UNKNOWN)

    def _make(self, card: ModelCard) -> PromptEncoder:
        self._provenance[_origin(card)] = provenance_of(card)
        return PromptEncoder(card, special_in_prompts=self._special_in_prompts)


def _origin(card: ModelCard) -> tuple[str, str, str]:
    return card.model_digest, card.engine, card.engine_version


def _preference(instance: Instance) -> tuple[bool, int]:
    return instance.ready, 0 if instance.card is None else -len(instance.card.all_lacks)
