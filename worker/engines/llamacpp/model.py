"""A model that llama.cpp has loaded, with its KV cells: batches in, logits out.

Used by one thread, except for ``stop``, which any thread may call.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.engines.llamacpp.library import (
    ABORTED,
    NO_CELLS,
    Batch,
    ContextParams,
    ModelParams,
    flag_callback,
    load_library,
)
from worker.engines.llamacpp.options import (
    CACHE_TYPES,
    FLASH_ATTENTION,
    LOAD_MODES,
    SPLIT_MODES,
    Options,
)
from worker.errors import BrokenCheckpoint, UnsupportedModel


class StepAborted(Exception):
    """The step was stopped midway; what it computed before may be in the cells."""


class OutOfCells(MemoryError):
    """No KV cells are left for the batch. Nothing of it was computed."""


class Piece(NamedTuple):
    """Consecutive tokens of one sequence in a batch."""

    sequence: int
    start: int
    """Position of the first token in the sequence."""
    tokens: Sequence[int]
    wants_logits: bool
    """Whether the logits of its last token are wanted."""


@dataclass(frozen=True, slots=True)
class ContextShape:
    """Numbers of KV ``cells`` and of ``sequences``; all share one pool of cells if ``unified``."""

    cells: int
    sequences: int
    batch_tokens: int
    unified: bool


class LoadedModel:
    """A model's weights and vocabulary, and facts about them."""

    def __init__(self, file: Path, options: Options, *, on_gpu: bool) -> None:
        """Load the file. Raises ``EngineMissing``, ``BrokenCheckpoint``, ``UnsupportedModel``."""
        self._library = library = load_library()
        params: ModelParams = library.llama_model_default_params()
        if not on_gpu:
            params.n_gpu_layers = 0
        elif options.n_gpu_layers is not None:
            params.n_gpu_layers = options.n_gpu_layers
        params.load_mode = LOAD_MODES[options.load_mode]
        params.split_mode = SPLIT_MODES[options.split_mode]
        params.main_gpu = options.main_gpu or 0
        params.use_extra_bufts = options.repack
        self.handle = library.llama_model_load_from_file(os.fsencode(file), params)
        if not self.handle:
            raise BrokenCheckpoint(
                f"llama.cpp cannot load {file}: its own words are in the log above; the file may be"
                " incomplete, or of an architecture newer than this build"
            )
        refused = {
            "an encoder": library.llama_model_has_encoder(self.handle),
            "diffusion": library.llama_model_is_diffusion(self.handle),
        }
        if any(refused.values()):
            self.close()
            kind = next(name for name, is_it in refused.items() if is_it)
            raise UnsupportedModel(
                f"{file}: a model with {kind} does not make text token by token; take a decoder"
            )
        self._vocabulary = library.llama_model_get_vocab(self.handle)
        self.vocab_size: int = library.llama_vocab_n_tokens(self._vocabulary)
        self.trained_context: int = library.llama_model_n_ctx_train(self.handle)
        self.parameters: int = library.llama_model_n_params(self.handle)
        self.keeps_prefixes: bool = not (
            library.llama_model_is_recurrent(self.handle)
            or library.llama_model_is_hybrid(self.handle)
        )
        """Whether a sequence's state can be cut to a shorter text; False if it is recurrent."""

    @property
    def description(self) -> str:
        """Architecture, size and type, in llama.cpp's words."""
        buffer = ctypes.create_string_buffer(128)
        self._library.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def ends_text(self, token: int) -> bool:
        """Whether llama.cpp treats ``token`` as the end of a text or a turn."""
        return bool(self._library.llama_vocab_is_eog(self._vocabulary, token))

    def tokenize(self, text: str) -> list[int]:
        """Token ids by llama.cpp's own tokenizer, without special tokens and those at the ends."""
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 8))()
        count = self._library.llama_tokenize(
            self._vocabulary, data, len(data), out, len(out), False, False
        )
        return list(out[: max(0, count)])

    def close(self) -> None:
        """Release the weights. Idempotent."""
        if self.handle:
            self._library.llama_model_free(self.handle)
            self.handle = None


class Context:
    """KV cells and buffers for a loaded model, which it closes too. Raises ``MemoryError`` where
    they do not fit."""

    def __init__(
        self, model: LoadedModel, shape: ContextShape, options: Options, threads: int
    ) -> None:
        self._library = library = load_library()
        params: ContextParams = library.llama_context_default_params()
        params.n_ctx = shape.cells
        params.n_seq_max = shape.sequences
        params.n_batch = shape.batch_tokens
        params.n_ubatch = min(shape.batch_tokens, options.n_ubatch or params.n_ubatch)
        params.n_threads = options.threads or threads
        params.n_threads_batch = options.threads_batch or params.n_threads
        params.flash_attn_type = FLASH_ATTENTION[options.flash_attn]
        params.type_k = CACHE_TYPES[options.type_k]
        params.type_v = CACHE_TYPES[options.type_v]
        params.kv_unified = shape.unified
        params.rope_freq_base = options.rope_freq_base or 0.0
        params.rope_freq_scale = options.rope_freq_scale or 0.0
        # One byte and a 0 behind it: see ``flag_callback``.
        self._stop = ctypes.create_string_buffer(2)
        params.abort_callback = flag_callback()
        params.abort_callback_data = ctypes.addressof(self._stop)
        self._handle = library.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise MemoryError(
                f"llama.cpp has no memory for {shape.cells} KV cells beside the weights, or cannot"
                f" have them as type_k={options.type_k}, type_v={options.type_v}: its own words are"
                " in the log above; set TIDEGATE_WORKER__KV__BLOCKS or TIDEGATE_WORKER__MAX_RUNNING"
                " lower"
            )
        self._model = model
        self._memory = library.llama_get_memory(self._handle)
        self.cells: int = library.llama_n_ctx(self._handle)
        self.sequence_cells: int = library.llama_n_ctx_seq(self._handle)
        """Most cells that one sequence can have."""
        self.batch_tokens: int = library.llama_n_batch(self._handle)
        self._vocab_size = model.vocab_size
        self._batch = _BatchArrays(self.batch_tokens)

    def compute(self, pieces: Sequence[Piece]) -> NDArray[np.float32]:
        """Logits [pieces that want them, vocabulary], which the next call overwrites.

        Raises ``OutOfCells``, ``StepAborted``, and ``RuntimeError`` where llama.cpp fails.
        """
        batch, outputs = self._batch.fill(pieces)
        answer = self._library.llama_decode(self._handle, batch)
        if answer == ABORTED:
            raise StepAborted
        if answer == NO_CELLS:
            raise OutOfCells("llama.cpp found no KV cells for a step")
        if answer:
            raise RuntimeError(f"llama_decode failed with {answer}: the log has its own words")
        # This call also waits for the end of the computation.
        logits = self._library.llama_get_logits(self._handle)
        if not outputs:
            return np.empty((0, self._vocab_size), np.float32)
        return np.ctypeslib.as_array(logits, (outputs, self._vocab_size))

    def stop(self, wanted: bool) -> None:
        """Have the step under way end soon, or let steps run again. Any thread."""
        self._stop[0] = b"\1" if wanted else b"\0"

    def cut(self, sequence: int, length: int) -> bool:
        """Forget what a sequence holds from position ``length`` on; False if impossible."""
        return bool(self._library.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def copy(self, source: int, target: int, length: int) -> None:
        """Have ``target`` hold the first ``length`` positions of ``source``, in the same cells."""
        self._library.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def held(self, sequence: int) -> int:
        """Positions that a sequence holds."""
        return int(self._library.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def close(self) -> None:
        """Release cells, buffers and the model. Idempotent."""
        if self._handle:
            self._library.llama_free(self._handle)
            self._handle = None
        self._model.close()


class _BatchArrays:
    """The arrays of ``llama_batch``, allocated once."""

    def __init__(self, size: int) -> None:
        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._counts = np.ones(size, np.int32)
        self._sequences = np.zeros(size, np.int32)
        addresses = self._sequences.ctypes.data + np.arange(size, dtype=np.uint64) * 4
        self._sequence_of = addresses.astype(np.uintp)
        self._wanted = np.zeros(size, np.int8)
        self._batch = Batch(
            token=_pointer(self._tokens, ctypes.c_int32),
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._counts, ctypes.c_int32),
            seq_id=_pointer(self._sequence_of, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(self, pieces: Sequence[Piece]) -> tuple[Any, int]:
        """Fill the arrays; returns the batch and how many of its tokens give logits."""
        at = outputs = 0
        for piece in pieces:
            end = at + len(piece.tokens)
            self._tokens[at:end] = piece.tokens
            self._positions[at:end] = np.arange(piece.start, piece.start + end - at)
            self._sequences[at:end] = piece.sequence
            self._wanted[at:end] = 0
            if piece.wants_logits:
                self._wanted[end - 1] = 1
                outputs += 1
            at = end
        self._batch.n_tokens = at
        return self._batch, outputs


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
