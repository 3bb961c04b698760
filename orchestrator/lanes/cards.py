"""Makes model cards for servers that have none, from the tokenizer's folder, what the server told,
and facts about its kind.
"""

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from orchestrator.lanes.endpoint import Endpoint
from orchestrator.lanes.model_folder import ModelFolder
from protocol import Feature, ModelCard, SamplingDefaults

ALWAYS_LACKING = frozenset(
    {
        Feature.EMBEDDINGS,
        Feature.FINISH,
        Feature.GRAMMAR,
        Feature.KV_EVENTS,
        Feature.PROMPT_LOGPROBS,
        Feature.SESSIONS,
        Feature.STATISTICS,
        Feature.STEP_ABORT,
    }
)
"""Features that every server lacks which is not Tidegate's: its API cannot ask for or tell them, or
this side does not ask."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts that a server told about itself; 0 or empty if it did not."""

    model: str
    engine: str
    version: str = ""
    context_tokens: int = 0
    slots: int = 0
    quantization: str = ""


def make_card(
    endpoint: Endpoint,
    folder: ModelFolder,
    told: ServerFacts,
    *,
    lacks: Collection[Feature],
    abort_ms: float,
    slots: int,
    takes_ids: bool,
) -> ModelCard:
    """A card for the server. ``abort_ms`` and ``slots`` are the kind's usual ones."""
    contexts = [c for c in (endpoint.context, told.context_tokens, folder.context_tokens) if c]
    # An instance that states no weights shares them with none: equal names do not mean equal files.
    weights = endpoint.weights or f"{endpoint.name} {told.model}"
    is_digest = _DIGEST.fullmatch(endpoint.weights)  # as workers have it
    return ModelCard(
        model=endpoint.alias or told.model,
        context_tokens=min(contexts, default=2048),
        vocab_size=folder.vocab_size,
        tokenizer_json=folder.tokenizer_json,
        chat_template=folder.chat_template,
        special_tokens=folder.special_tokens,
        bos_token_id=folder.bos_token_id,
        eos_token_ids=folder.eos_token_ids,
        block_tokens=0,
        hash_salt=b"",
        engine=told.engine,
        engine_version=told.version,
        engine_digest="",
        model_digest=weights if is_digest else hashlib.sha256(weights.encode()).hexdigest(),
        device="",
        max_running=endpoint.slots or told.slots or slots,
        max_waiting=0,
        min_start_budget_ms=0.0,
        full_context_tokens=folder.context_tokens,
        sampling_defaults=_served(folder.sampling_defaults, lacks),
        can_continue=False,
        lacks=tuple(sorted(ALWAYS_LACKING.union(lacks, () if takes_ids else (Feature.TOKEN_IDS,)))),
        abort_ms=abort_ms if endpoint.abort_ms is None else endpoint.abort_ms,
        quantization=told.quantization,
    )


def _served(defaults: SamplingDefaults, lacks: Collection[Feature]) -> SamplingDefaults:
    """``defaults`` without those that the server cannot follow: no client asked for them."""
    unserved = {"repetition_penalty": Feature.PENALTIES, "min_p": Feature.MIN_P}
    left_out = {name: None for name, feature in unserved.items() if feature in lacks}
    return msgspec.structs.replace(defaults, **left_out)
