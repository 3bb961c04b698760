"""Binds llama.cpp's C functions, for the one build whose header they are taken from.

The wheel ``xllamacpp`` has llama.cpp in its extension module and exports its C functions. Its own
classes drive llama.cpp's server, which knows no deadlines; so these functions are called instead.
The header changes between builds and nothing in a binary tells how its structs are laid out: one
version of the wheel is taken, and its defaults are compared before anything else is done.

Calls let go of the interpreter's lock, as ``ctypes`` does.
"""

import ctypes
from collections.abc import Sequence
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from worker.errors import EngineMissing
from worker.log import model_log

PACKAGE: Final = "xllamacpp"
VERSION: Final = "2026.10.11549"
"""The only version of the wheel that is accepted; its last part is llama.cpp's build number."""
INSTALL: Final = f"pip install '{PACKAGE}=={VERSION}'"

ABORTED: Final = 2
NO_CELLS: Final = 1
"""``llama_decode``'s answer when no KV cells are left; 0 is success, below 0 is failure."""

_LOG_CALLBACK = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_WARNING: Final = 3
_CONTINUATION: Final = 5
_NO_CONCERN: Final = "possible training context overflow"
"""A needless warning about cells that many texts share: none gets more than the model's context."""


class ModelParams(ctypes.Structure):
    """``llama_model_params``."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", POINTER(c_float)),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(ctypes.Structure):
    """``llama_context_params``."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(ctypes.Structure):
    """``llama_batch``: parallel arrays with an entry for each token."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


_HANDLE = c_void_p
_FUNCTIONS: Final[dict[str, tuple[Any, Sequence[Any]]]] = {
    "llama_version": (c_char_p, ()),
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (c_void_p, c_void_p)),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (_HANDLE, (c_char_p, ModelParams)),
    "llama_model_free": (None, (_HANDLE,)),
    "llama_model_get_vocab": (_HANDLE, (_HANDLE,)),
    "llama_model_n_ctx_train": (c_int32, (_HANDLE,)),
    "llama_model_n_params": (c_uint64, (_HANDLE,)),
    "llama_model_size": (c_uint64, (_HANDLE,)),
    "llama_model_desc": (c_int32, (_HANDLE, c_char_p, c_size_t)),
    "llama_model_has_encoder": (c_bool, (_HANDLE,)),
    "llama_model_is_recurrent": (c_bool, (_HANDLE,)),
    "llama_model_is_hybrid": (c_bool, (_HANDLE,)),
    "llama_model_is_diffusion": (c_bool, (_HANDLE,)),
    "llama_vocab_n_tokens": (c_int32, (_HANDLE,)),
    "llama_vocab_is_eog": (c_bool, (_HANDLE, c_int32)),
    "llama_tokenize": (
        c_int32,
        (_HANDLE, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool),
    ),
    "llama_init_from_model": (_HANDLE, (_HANDLE, ContextParams)),
    "llama_free": (None, (_HANDLE,)),
    "llama_n_ctx": (c_uint32, (_HANDLE,)),
    "llama_n_ctx_seq": (c_uint32, (_HANDLE,)),
    "llama_n_batch": (c_uint32, (_HANDLE,)),
    "llama_n_seq_max": (c_uint32, (_HANDLE,)),
    "llama_decode": (c_int32, (_HANDLE, Batch)),
    "llama_get_logits": (POINTER(c_float), (_HANDLE,)),
    "llama_get_memory": (_HANDLE, (_HANDLE,)),
    "llama_memory_clear": (None, (_HANDLE, c_bool)),
    "llama_memory_seq_rm": (c_bool, (_HANDLE, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (_HANDLE, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_pos_max": (c_int32, (_HANDLE, c_int32)),
    "llama_set_abort_callback": (None, (_HANDLE, c_void_p, c_void_p)),
}
_KNOWN_DEFAULTS: Final = (
    # Values at both ends of each struct and between, which a shifted field would give away.
    ("llama_model_default_params", {"n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0}),
    ("llama_model_default_params", {"use_extra_bufts": True, "vocab_only": False}),
    ("llama_context_default_params", {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512}),
    ("llama_context_default_params", {"n_seq_max": 1, "flash_attn_type": -1, "type_k": 1}),
    ("llama_context_default_params", {"type_v": 1, "offload_kqv": True, "ctx_other": None}),
)


@cache
def load_library() -> Any:
    """The library with typed functions, made ready once in a process. Raises ``EngineMissing``."""
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        installed = ""
    if installed != VERSION:
        found = f"{PACKAGE} {installed} is installed" if installed else f"{PACKAGE} is missing"
        raise EngineMissing(
            f"the llamacpp engine needs {PACKAGE} {VERSION}, whose llama.cpp it was written for,"
            f" and {found}: {INSTALL}"
        )
    try:
        from xllamacpp import xllamacpp as extension

        library = ctypes.CDLL(extension.__file__)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (ImportError, OSError, AttributeError) as error:
        raise EngineMissing(
            f"{PACKAGE} {VERSION} cannot be loaded ({error}); install it anew: pip install"
            f" --force-reinstall '{PACKAGE}=={VERSION}'"
        ) from error
    library.llama_log_set(ctypes.cast(_LOG, c_void_p), None)
    library.llama_backend_init()
    for function_name, known in _KNOWN_DEFAULTS:
        params = getattr(library, function_name)()
        for field, value in known.items():
            if getattr(params, field) != value:
                raise EngineMissing(
                    f"the llama.cpp in {PACKAGE} {VERSION} is laid out in another way than the"
                    f" release on PyPI ({field} is {getattr(params, field)!r}, not {value!r});"
                    f" install that one: pip install --force-reinstall '{PACKAGE}=={VERSION}'"
                )
    return library


def library_version() -> str:
    """llama.cpp's build number and the wheel's version, for the model card."""
    return f"llama.cpp b{VERSION.rsplit('.', 1)[-1]} ({PACKAGE} {VERSION})"


def flag_callback() -> int:
    """Address of a C function ``bool (*)(void *)`` that says whether the byte there is not 0.

    ``strlen`` of one byte and a 0 behind it is 1 or 0. llama.cpp asks between any two operations,
    on a thread of its own: a Python function would have it wait for the interpreter's lock there.
    """
    return ctypes.cast(ctypes.CDLL(None).strlen, c_void_p).value or 0


def _log(level: int, text: bytes, _: object) -> None:
    """Log llama.cpp's messages: warnings and errors as such, all others at debug level."""
    message = text.decode("utf-8", "replace").strip()
    if not message or message == ".":
        return
    if level < _WARNING or level == _CONTINUATION or _NO_CONCERN in message:
        model_log.debug("llama.cpp: %s", message)
    else:
        model_log.warning("llama.cpp: %s", message)


_LOG: Final = _LOG_CALLBACK(_log)
"""The log callback, kept alive because llama.cpp holds only its address."""
