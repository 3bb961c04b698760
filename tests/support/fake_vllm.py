"""A folder of packages that looks as if vLLM were in it, and models that name an architecture."""

import json
from pathlib import Path

REGISTRY = """
import torch_that_is_not_there

_TEXT_GENERATION_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    **{name: ("llama", "LlamaForCausalLM") for name in ()},
}
_EMBEDDING_MODELS = {"BertModel": ("bert", "BertModel")}
_MULTIMODAL_MODELS: dict[str, tuple[str, str]] = {
    "Gemma3ForConditionalGeneration": ("gemma3_mm", "Gemma3ForConditionalGeneration"),
}
"""


def install(folder: Path, *, version: str = "0.32.0", name: str = "vllm") -> Path:
    """Put vLLM's list of models into a folder of packages, and nothing else of it."""
    registry = folder / "vllm/model_executor/models/registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text(REGISTRY)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def checkpoint(folder: Path, *architectures: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": architectures}))
    return folder
