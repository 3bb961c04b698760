"""Code that orchestrator and worker share. Light to import: no torch, no Triton, no aiohttp.

- ``tensors``   tensor and request-parameter names of the Triton model, and what they may say
- ``outcomes``  how a job can end, and the codes that say why
- ``sampling``  the sampling parameters of a request, with checks of their limits
- ``card``      a worker's facts about its model, sent when a lane opens; requests' features
- ``grammar``   the grammar that an answer's text must match
- ``messages``  the messages on a lane, in both directions
- ``model_digest``  a name for a checkpoint's contents
- ``blocks``    the chained hashes of KV blocks
- ``excerpt``   shortens clients' text in error messages
- ``vision``    how a model reads images: their tokens in a prompt
"""

from protocol.blocks import (
    adapter_salt,
    block_hashes,
    hash_block,
    prefix_salt,
    root_hash,
)
from protocol.card import (
    Adapter,
    Feature,
    Loadable,
    ModelCard,
    StepCosts,
    context_note,
    features_of,
)
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
