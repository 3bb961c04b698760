"""Writes the weights of a GGUF file, llama.cpp's format, as a checkpoint in Hugging Face layout.

Quantized weights are dequantized once, to bfloat16. In the heads of Llama's queries and keys,
llama.cpp rotates neighbors, checkpoints rotate halves: those rows are reordered.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from protocol.gguf import GgufTensor, parts_of, read_tensors
from worker.errors import BrokenCheckpoint, UnsupportedModel
from worker.models.gguf import vocabulary
from worker.models.gguf.file import GgufFile

_CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""Our architectures by llama.cpp's names. Mistral's are ``llama`` there, and so are its weights."""
_OUTER: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_MORE: Final = {
    "llama": {},
    "qwen2": {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
    "qwen3": (_NORMED := {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}),
    "gemma3": _NORMED
    | {
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    },
}
_ROPE: Final = "rope_freqs.weight"
_PIECE_ELEMENTS: Final = 2**22
"""Elements dequantized at a time: 16 MiB in float32, with several copies."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A planned checkpoint: its ``config.json`` and its tensors by their names there."""

    config: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def bytes(self) -> int:
        """Bytes of the weights once they are written."""
        return sum(2 * math.prod(each.shape) for each in self.tensors.values())


def plan_weights(file: GgufFile) -> Conversion:
    """Plan the conversion of ``file`` to a checkpoint, from its header alone.

    Raises ``UnsupportedModel`` that names what is not read here, ``BrokenCheckpoint``.
    """
    name, arch = file.path.name, file.architecture
    if file.text("general.type", "model") != "model" or arch not in _CLASSES:
        raise UnsupportedModel(
            f"{name} is a {file.text('general.type', 'model')} of the architecture {arch!r}; only"
            f" models of {', '.join(_CLASSES)} (llama is Mistral's, too) are read from GGUF"
        )
    try:
        found = {one.name: one for part in parts_of(file.path) for one in read_tensors(part)}
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{name}: {error}") from error
    rope = found.pop(_ROPE, None)
    layers = range(file.of_model("block_count"))
    names = _OUTER | {
        f"blk.{i}.{theirs}": f"model.layers.{i}.{ours}"
        for i in layers
        for theirs, ours in (_INNER | _MORE[arch]).items()
    }
    strangers = sorted(found.keys() - names.keys())
    kinds = {each.kind: each for each in found.values() if not _is_readable(each)}
    if strangers:
        raise UnsupportedModel(f"{name} has tensors that {arch} has not: {_some(strangers)}")
    if kinds:
        kind, one = next(iter(kinds.items()))
        raise UnsupportedModel(f"{name}: {one.name} is of ggml's type {kind}, not read here")
    if missing := sorted(names.keys() - found.keys() - {"output.weight"}):
        raise BrokenCheckpoint(f"{name} lacks the tensors {_some(missing)}; download it again")
    config = _config(file, found, rope)
    return Conversion(config, {names[each.name]: each for each in found.values()})


def write_weights(plan: Conversion, target: Path, came: Callable[[int], None]) -> None:
    """Write ``model.safetensors`` as ``target``; ``came`` gets the number of bytes just written."""
    heads = {"q_proj.weight": plan.config["num_attention_heads"]}
    heads["k_proj.weight"] = plan.config["num_key_value_heads"]
    turned = plan.config["architectures"] == [_CLASSES["llama"]]
    has_one_more = plan.config["architectures"] == [_CLASSES["gemma3"]]  # in its norms
    header, at = {}, 0
    for name, tensor in plan.tensors.items():
        end = at + 2 * math.prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in plan.tensors.items():
            its = heads.get(".".join(name.rsplit(".", 2)[-2:]), 0) if turned else 0
            for piece in _dequantized(tensor, tensor.shape[0] // its if its else 1):
                if its:
                    piece = _halves(piece, plan.config["head_dim"])
                if has_one_more and name.endswith("norm.weight"):
                    piece = piece - 1
                data = quants.quantize(piece, GGMLQuantizationType.BF16)
                out.write(data.tobytes())
                came(data.nbytes)


def _dequantized(tensor: GgufTensor, unit: int) -> Iterator[NDArray[np.float32]]:
    """The tensor in float32, some multiple of ``unit`` rows at a time."""
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    some = max(1, _PIECE_ELEMENTS // tensor.shape[-1] // unit) * unit
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        for first in range(0, rows, some):
            count = min(some, rows - first)
            raw = np.frombuffer(file.read(count * tensor.row_bytes), np.uint8)
            if raw.size < count * tensor.row_bytes:
                raise BrokenCheckpoint(f"{tensor.file} was cut while it was read")
            kind = GGMLQuantizationType(tensor.kind)
            yield quants.dequantize(raw.reshape(count, tensor.row_bytes), kind)


def _halves(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows of whole heads, with neighbors reordered into two halves."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _is_readable(tensor: GgufTensor) -> bool:
    if not tensor.row_bytes or len(tensor.shape) > 2:
        return False
    try:
        kind = GGMLQuantizationType(tensor.kind)
        quants.dequantize(np.zeros((1, tensor.row_bytes), np.uint8), kind)
    except (NotImplementedError, ValueError):
        return False
    return True


def _config(
    file: GgufFile, found: dict[str, GgufTensor], rope: GgufTensor | None
) -> dict[str, Any]:
    vocabulary_size, hidden = found["token_embd.weight"].shape
    heads = file.of_model("attention.head_count", 1)
    head_dim = file.of_model("attention.key_length", hidden // heads)
    arch = file.architecture
    for key, plain in (
        ("expert_count", 0),
        ("rope.dimension_count", head_dim),
        ("attention.value_length", head_dim),
        *((scale, None) for scale in ("attention.scale", "logit_scale", "residual_scale")),
    ):
        stated = file.values.get(f"{arch}.{key}", plain)
        if stated != plain:
            raise UnsupportedModel(f"{file.path.name}: {arch}.{key}={stated} is not read here")
    theta = file.number(f"{arch}.rope.freq_base") or 10000.0
    epsilon = file.number(f"{arch}.attention.layer_norm_rms_epsilon") or 1e-6
    config: dict[str, Any] = {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "vocab_size": vocabulary_size,
        "hidden_size": hidden,
        "intermediate_size": file.of_model("feed_forward_length"),
        "num_hidden_layers": file.of_model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.of_model("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.of_model("context_length"),
        "rms_norm_eps": float(f"{epsilon:.6g}"),  # the file has it as a float32
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in found,
        "torch_dtype": "bfloat16",
        "bos_token_id": file.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": vocabulary.end_ids(file),
    }
    if arch == "gemma3":
        config |= {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": head_dim,
            "sliding_window": file.of_model("attention.sliding_window"),
            "sliding_window_pattern": 6,
            "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa") or 10000.0,
        }
    scaling = _llama3(file, rope, theta) if rope is not None else _stretch(file)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _stretch(file: GgufFile) -> dict[str, Any] | None:
    key = f"{file.architecture}.rope.scaling."
    kind = file.text(key + "type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{file.path.name}: {key}type={kind!r} is not read here")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": file.number(key + "factor") or 1.0}
    if kind == "yarn":
        original = file.whole(key + "original_context_length", file.of_model("context_length"))
        scaling["original_max_position_embeddings"] = original
        if own := file.number(key + "attn_factor"):  # llama.cpp multiplies YaRN's own value by it
            scaling["attention_factor"] = own * (0.1 * math.log(max(1.0, scaling["factor"])) + 1)
    return scaling


def _llama3(file: GgufFile, rope: GgufTensor, theta: float) -> dict[str, Any]:
    """Llama 3.1's stretch, of which a file has only the factors: found again, or refused."""
    factors = next(_dequantized(rope, 1))[0]
    half = len(factors)
    waves = 2 * math.pi * theta ** (np.arange(half) / half)
    stretch, low, high = float(factors.max()), 1.0, 4.0
    for original in (2**power for power in range(5, 21)):
        smooth = np.clip((original / waves - low) / (high - low), 0, 1)
        if np.allclose(factors, 1 / ((1 - smooth) / stretch + smooth), rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": round(stretch, 4),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModel(f"{file.path.name}: {_ROPE} is not a stretch like Llama 3.1's")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
