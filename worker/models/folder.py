"""Names model folders and explains why a folder cannot be served. No torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from protocol.gguf import gguf_name
from worker.encoding import readable

_CACHE_PREFIX: Final = "models--"
_PICKLES: Final = (".bin", ".pth", ".pt", ".ckpt")
_TO_SAFETENSORS: Final = (
    "convert them with transformers:"
    " AutoModelForCausalLM.from_pretrained(OLD, dtype='auto').save_pretrained(NEW),"
    " and save the tokenizer to the same folder likewise"
)


def model_name(path: Path) -> str:
    """The directory's name; ``org/name`` for a snapshot in a Hugging Face cache; the file name
    without its part number for a GGUF file.

    Such a snapshot's path ends in ``models--org--name/snapshots/<commit>``.
    """
    if path.suffix == ".gguf":
        return readable(gguf_name(path))
    path = path.resolve()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith(_CACHE_PREFIX):
        return readable(repository.removeprefix(_CACHE_PREFIX).replace("--", "/"))
    return readable(path.name)


def why_unservable(path: Path) -> str | None:
    """What ``path`` is and what to do, if it lacks ``config.json`` or weights; otherwise None."""
    if not path.exists():
        return f"{path} does not exist"
    if path.suffix == ".gguf" and not path.is_dir():
        return _gguf_advice(str(path))
    if not path.is_dir():
        return f"{path} is a file; point the model path at the directory that it is in"
    has_config = (path / "config.json").exists()
    weights = ("model.safetensors", "model.safetensors.index.json")
    if has_config and any((path / name).exists() for name in weights):
        return None
    for kind in (_lora, _gguf, _cache):
        found = kind(path)
        if found is not None:
            return found
    pickled = _files(path, lambda f: f.suffix in _PICKLES and f.stem != "training_args")
    if not has_config:
        missing = f"{path / 'config.json'} is missing; point the model path at a checkpoint"
        if pickled:
            return (
                f"{missing} in Hugging Face layout; this folder has its weights in"
                f" {_some(pickled)}, as their author's own code wrote them: take the repository's"
                " version for transformers"
            )
        return f"{missing} directory in Hugging Face layout"
    if pickled:
        return (
            f"{path} has its weights in {_some(pickled)} only, which are pickles and could run any"
            f" code; this worker reads safetensors: {_TO_SAFETENSORS}"
        )
    if shards := _files(path, lambda file: file.suffix == ".safetensors"):
        return (
            f"{path / 'model.safetensors'} is missing, and so is model.safetensors.index.json,"
            f" which would say what is in {_some(shards)}; download the checkpoint again"
        )
    return (
        f"{path / 'model.safetensors'} is missing; the download of this checkpoint is not complete"
    )


def _lora(path: Path) -> str | None:
    if not (path / "adapter_config.json").exists():
        return None
    return (
        f"{path} is a LoRA adapter (adapter_config.json), not a model; serve its base model with it"
        " (TIDEGATE_WORKER__ADAPTERS, on vLLM), or merge it into that"
        " with peft: AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload()"
        ".save_pretrained(NEW), and save the base model's tokenizer to the same folder"
    )


def _gguf(path: Path) -> str | None:
    files = _files(path, lambda file: file.suffix == ".gguf")
    return _gguf_advice(f"{path} ({_some(files)})") if files else None


def _gguf_advice(what: str) -> str:
    return (
        f"{what} is in GGUF, llama.cpp's format: tidegate models add FILE.gguf makes a checkpoint"
        " of it, and so does tidegate up --model FILE.gguf; or take the original checkpoint with"
        " safetensors, from which it was made"
    )


def _cache(path: Path) -> str | None:
    """Advice if ``path`` is a repository folder in a Hugging Face cache; otherwise None."""
    snapshots = path / "snapshots"
    if not path.name.startswith(_CACHE_PREFIX) or not snapshots.is_dir():
        return None
    known = sorted(snapshots.iterdir(), key=lambda each: each.stat().st_mtime)
    one = known[-1] if known else snapshots / "<commit>"
    return f"{path} is a repository in a Hugging Face cache; point the model path at {one}"


def _files(path: Path, wanted: Callable[[Path], bool]) -> list[str]:
    return sorted(file.name for file in path.iterdir() if wanted(file))


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
