"""Code that orchestrator and worker share. Light to import: no torch, no Triton, no aiohttp."""

from protocol.blocks import adapter_salt, block_hashes, prefix_salt
from protocol.card import Adapter, Feature, Loadable, ModelCard, StepCosts, features_of
from protocol.excerpt import brief, excerpt
from protocol.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, InvalidGrammar
from protocol.messages import (
    CERTAIN_AFTER_STEPS,
    CERTAIN_SHARE,
    HEARTBEAT_S,
    NO_TOKEN_ID,
    PROTOCOL_VERSION,
    Cancel,
    Delta,
    Describe,
    Drain,
    End,
    Frame,
    KvReport,
    LaneError,
    LaneMessage,
    Open,
    Pause,
    PromptLogprobs,
    Resume,
    Started,
    Submit,
    Swap,
    SwapPhase,
    SwapReport,
    TokenLogprob,
    WorkerStats,
    decode_frame,
    decode_message,
    encode,
)
from protocol.outcomes import AbortCause, Code, FinishReason, OnDeadline, Outcome
from protocol.sampling import (
    MAX_LOGIT_BIASES,
    InvalidSampling,
    Sampling,
    SamplingDefaults,
    read_logit_bias,
    stated_of,
    unstated_of,
)
from protocol.vision import ImageTokens, Vision, keyed_by_images
