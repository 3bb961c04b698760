"""Writes what an orchestrator needs of a GGUF file that another server runs::

    python -m worker.models.gguf FILE.gguf FOLDER

The vocabulary, chat template, end tokens, context and recommended sampling, as the files in which
checkpoints in Hugging Face layout have them.
"""

import json
import os
import sys
from pathlib import Path
from typing import Final

from worker.errors import LoadError
from worker.models.gguf import vocabulary
from worker.models.gguf.file import GgufFile

_SAMPLING: Final = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def write_folder(file: GgufFile, folder: Path) -> None:
    """Write the files into ``folder``, each in one step. Raises ``LoadError``, ``OSError``."""
    stated = {
        name: value
        for name, key in _SAMPLING.items()
        if (value := file.values.get(f"general.sampling.{key}")) is not None
    }
    settings = vocabulary.token_settings(file) | {"chat_template": vocabulary.chat_template(file)}
    config = {"max_position_embeddings": file.of_model("context_length")}
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


def main() -> int:
    """Run the command; returns its exit status."""
    try:
        write_folder(GgufFile(Path(sys.argv[1])), Path(sys.argv[2]))
    except (LoadError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
