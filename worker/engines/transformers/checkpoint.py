"""A checkpoint as ``transformers`` reads it, with errors that say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from worker.errors import BrokenCheckpoint, EngineMissing, LoadError, UnsupportedModel
from worker.extras import pip_install
from worker.log import model_log
from worker.models.config import read_generation_config
from worker.models.folder import why_unservable
from worker.settings import WorkerSettings

_NO_CONTEXT: Final = 8192
"""Context in tokens for architectures whose configuration names none (they have no positions)."""
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
"""Files that say how images are prepared."""
_CODE: Final = (
    "its repository brings code of its own, which would run here with all that this process may do;"
    " where you trust it, set TIDEGATE_WORKER__TRUST_REMOTE_CODE=true"
)


@dataclass(frozen=True, slots=True)
class Facts:
    """The part of a model's configuration that its card needs."""

    architecture: str
    vocab_size: int
    context_tokens: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    reads_images: bool = False
    """Whether the library has a class for it that reads images, and the folder what prepares
    them."""


def read_facts(settings: WorkerSettings) -> Facts:
    """Read ``config.json``. Raises ``EngineMissing`` or ``CheckpointError``."""
    path = settings.model_path
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise EngineMissing(
            f"the engine 'transformers' cannot be imported ({error}); where the worker runs:"
            f" {pip_install('transformers')}"
        ) from error
    if (problem := why_unservable(path)) is not None:
        raise BrokenCheckpoint(problem)
    with _errors_of(path):
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=settings.trust_remote_code, local_files_only=True
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{path}: {config.model_type} encodes its prompt and decodes another text, which no"
            " engine of this worker does; it runs models that continue a text"
        )
    text = config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    if not context:
        model_log.warning("%s names no context; taking %d tokens", path, _NO_CONTEXT)
    generation = read_generation_config(path)
    eos = _ids(generation.get("eos_token_id", getattr(config, "eos_token_id", None)))
    bos = _ids(generation.get("bos_token_id", getattr(config, "bos_token_id", None)))
    names = getattr(config, "architectures", None) or [config.model_type]
    return Facts(
        architecture=str(names[0]),
        vocab_size=int(text.vocab_size),
        context_tokens=int(context or _NO_CONTEXT),
        bos_token_id=next(iter(bos), None),
        eos_token_ids=tuple([one for one in eos if 0 <= one < text.vocab_size]),
        reads_images=_reads_images(path, config),
    )


def _reads_images(path: Path, config: Any) -> bool:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return (
        getattr(config, "vision_config", None) is not None
        and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and any((path / name).exists() for name in _PROCESSORS)
    )


def load_model(
    settings: WorkerSettings, facts: Facts, device: torch.device, dtype: torch.dtype | str
) -> Any:
    """The library's model, ready to compute. Raises ``CheckpointError``."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reads_images = facts.reads_images and settings.image_bytes
    kind = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    path = settings.model_path
    asked = {
        "dtype": dtype,
        "local_files_only": True,
        "trust_remote_code": settings.trust_remote_code,
        "use_safetensors": True,
    }
    with _errors_of(path):
        model: Any = kind.from_pretrained(path, **asked)
        return model.to(device).eval()


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except LoadError:
        raise
    except (ImportError, KeyError, ValueError) as error:
        said = str(error).strip().split("\n")[0]
        why = _CODE if "trust_remote_code" in str(error) else said
        raise UnsupportedModel(
            f"{path} cannot be run by transformers {_version()}: {why}"
        ) from error
    except (OSError, RuntimeError) as error:
        said = str(error).strip().split("\n")[0]
        raise BrokenCheckpoint(f"{path} cannot be loaded by transformers: {said}") from error


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    return tuple([one for one in values if isinstance(one, int)])
