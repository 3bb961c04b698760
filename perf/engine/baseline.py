"""``transformers`` ``generate`` on the same weights, in the same process and run."""

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from perf.report.command import Skip


class Baseline:
    """``transformers`` with the model of a checkpoint. Raises ``Skip`` without transformers."""

    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        try:
            transformers: Any = import_module("transformers")
        except ImportError as error:
            raise Skip(f"transformers is not installed ({error})") from error
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(
            device
        )
        self._config = transformers.GenerationConfig
        self._device = device

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds for exactly ``tokens`` greedy tokens after each of equally long ``prompts``."""
        ids = torch.tensor(prompts, device=self._device)
        config = self._config(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        begun = time.perf_counter()
        self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return time.perf_counter() - begun
