"""Writes a GGUF file in the layout of Hugging Face's checkpoints::

    python -m worker.models.gguf FILE.gguf FOLDER            for an orchestrator, where another
                                                             server runs the model: no weights
    python -m worker.models.gguf FILE.gguf FOLDER --weights  all of it, for our own engine

With ``--weights`` a line says how many bytes of weights there will be, then lines say how many have
come; the exit status is 2 where the file is sound and our engine does not read it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from worker.errors import LoadError, TokenizerError, UnsupportedModel
from worker.models.gguf import vocabulary
from worker.models.gguf.file import GgufFile

_SAMPLING: Final = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def write_folder(file: GgufFile, folder: Path, config: dict[str, Any] | None = None) -> None:
    """Write the small files into ``folder``, each in one step. Raises ``LoadError``, ``OSError``.

    ``config``: a whole ``config.json``; None for one that has the context alone.
    """
    stated = {
        name: value
        for name, key in _SAMPLING.items()
        if (value := file.values.get(f"general.sampling.{key}")) is not None
    }
    settings = vocabulary.token_settings(file) | {"chat_template": vocabulary.chat_template(file)}
    config = config or {"max_position_embeddings": file.of_model("context_length")}
    generation = {"eos_token_id": vocabulary.end_ids(file)} | stated
    files = {
        "tokenizer.json": vocabulary.build_tokenizer(file),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps(generation).encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        partial = folder / f"{name}.{os.getpid()}"
        partial.write_bytes(data)
        partial.replace(folder / name)


def write_checkpoint(file: GgufFile, folder: Path) -> None:
    """Write all files into ``folder``, and tell on stdout how far it is."""
    from worker.models.gguf.weights import plan_weights, write_weights

    plan = plan_weights(file)
    write_folder(file, folder, plan.config)
    print(plan.bytes, flush=True)
    write_weights(plan, folder / "model.safetensors", lambda count: print(count, flush=True))


def main() -> int:
    """Run the command; returns its exit status."""
    try:
        write = write_checkpoint if "--weights" in sys.argv else write_folder
        write(GgufFile(Path(sys.argv[1])), Path(sys.argv[2]))
    except (LoadError, OSError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UnsupportedModel | TokenizerError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
