"""Writes a Hugging Face checkpoint as GGUF, for tests of what reads such files.

For the architectures that our own engine runs (Llama, Mistral, Qwen2, Qwen3) with a
``tokenizer.json`` of BPE. The file carries that tokenizer as it is, and in llama.cpp's own form.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from worker.models.checkpoint import Checkpoint
from worker.models.config import ModelConfig, read_config
from worker.models.folder import model_name
from worker.models.gguf import vocabulary
from worker.models.model import rotary_frequencies, tied_as_stored
from worker.models.parameters import StoredPart
from worker.models.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling, yarn_mscale
from worker.text import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

_UNUSED, _BYTE = 5, 6
"""Kinds of tokens, in addition to those of ``vocabulary``."""
TYPES: Final = ("f32", "f16", "bf16", "q8_0")
_Q8_ROW: Final = 32
_ARCHITECTURES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_OUTER: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INNER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(folder: Path, file: Path, kind: str = "f16") -> None:
    """Write the checkpoint ``folder`` as ``file``, matrices as ``kind``, one of ``TYPES``."""
    from gguf import GGUFWriter

    config = tied_as_stored(folder, read_config(folder))
    writer = GGUFWriter(file, _ARCHITECTURES[config.architecture])
    _write_model(writer, folder, config)
    _write_vocabulary(writer, folder, config)
    with Checkpoint(folder) as checkpoint:
        for tensor in _tensors(checkpoint, config):
            _add_tensor(writer, tensor, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def _write_model(writer: "GGUFWriter", folder: Path, config: ModelConfig) -> None:
    writer.add_name(model_name(folder))
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    from gguf import RopeScalingType

    match config.rope_scaling:
        case LinearScaling(factor):
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        case YarnScaling() as yarn:
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(yarn.factor)
            writer.add_rope_scaling_orig_ctx_len(yarn.original_max_position_embeddings)
            # llama.cpp multiplies this by YaRN's own value for the factor.
            own = yarn.attention_factor / yarn_mscale(yarn.factor)
            writer.add_rope_scaling_attn_factors(own)


def _write_vocabulary(writer: "GGUFWriter", folder: Path, config: ModelConfig) -> None:
    tokenizer = Tokenizer.from_directory(folder, config.eos_token_ids)
    stated = json.loads(tokenizer.json)
    assert stated["model"]["type"] == "BPE"
    pieces = [f"[PAD{i}]" for i in range(config.vocab_size)]
    kinds = [_UNUSED] * config.vocab_size
    spelled = _Bytes() if _is_byte_level(stated) else _Blanks()
    for piece, index in stated["model"]["vocab"].items():
        pieces[index], kinds[index] = spelled.piece(piece), spelled.kind(piece)
    for token in stated["added_tokens"]:
        pieces[token["id"]] = token["content"]
        special = token["special"]
        kinds[token["id"]] = vocabulary.CONTROL if special else vocabulary.USER_DEFINED
    writer.add_tokenizer_model(spelled.model)
    if spelled.model == "gpt2":
        writer.add_tokenizer_pre(_pattern_name(stated))
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in _merges(stated)]
    if spelled.model == "gpt2":
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores([-float(i) for i in range(config.vocab_size)])
        writer.add_add_space_prefix(False)
    ids = list(config.eos_token_ids)
    own = tokenizer.eos_token_id
    if own is not None and own not in ids:
        ids.append(own)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_add_bos_token(_begins_with_bos(tokenizer))
    if ids:
        writer.add_eos_token_id(ids[0])
    if len(ids) > 1:
        writer.add_eot_token_id(ids[-1])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    writer.add_string(vocabulary.ORIGINAL, tokenizer.json.decode())


def _merges(stated: dict[str, Any]) -> list[Any]:
    merges: list[Any] = stated["model"].get("merges", [])
    return merges


def _begins_with_bos(tokenizer: Tokenizer) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("a")[:1] == [bos]


def _pattern_name(stated: dict[str, Any]) -> str:
    """llama.cpp's name for the pattern by which the original splits text; ``default`` for none."""
    found: str | None = None
    before = stated.get("pre_tokenizer") or {}
    for step in before.get("pretokenizers", [before]):
        if step.get("type") == "Split":
            found = _name_of_pattern(step["pattern"].get("Regex", ""))
        elif step.get("type") == "ByteLevel" and step.get("use_regex", True):
            found = "gpt-2"
    return found or "default"


def _name_of_pattern(pattern: str) -> str | None:
    known = vocabulary.PATTERNS.items()
    return next((name for name, patterns in known if patterns == (pattern,)), None)


def _is_byte_level(tokenizer_json: dict[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` has bytes written as letters, as GPT-2 did."""
    return "ByteLevel" in json.dumps(
        [tokenizer_json.get("decoder"), tokenizer_json["model"]["type"]]
    )


class _Bytes:
    """Byte-level pieces, which write bytes as letters and stay as they are."""

    model = "gpt2"

    def piece(self, piece: str) -> str:
        return piece

    def kind(self, piece: str) -> int:
        return 1


class _Blanks:
    """SentencePiece's pieces: blanks are written as underlines, bytes as ``<0x..>``."""

    model = "llama"

    def piece(self, piece: str) -> str:
        return piece.replace(" ", "\u2581")

    def kind(self, piece: str) -> int:
        is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
        return _BYTE if is_byte else 1


class _Tensor(NamedTuple):
    name: str
    values: NDArray[np.float32]


def _tensors(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[_Tensor]:
    if isinstance(config.rope_scaling, Llama3Scaling):
        stretched, _ = rotary_frequencies(config)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        factors = config.rope_theta**-exponents / stretched
        yield _Tensor("rope_freqs.weight", factors.numpy())
    for name in sorted(checkpoint.names):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = _name_of(name)
        if theirs is None:
            continue
        values = checkpoint.mapped(StoredPart(name, ())).float().numpy()
        if _ARCHITECTURES[config.architecture] == "llama":
            if ".attn_q." in theirs:
                values = _interleaved(values, config.num_heads)
            elif ".attn_k." in theirs:
                values = _interleaved(values, config.num_kv_heads)
        yield _Tensor(theirs, values)


def _name_of(name: str) -> str | None:
    """llama.cpp's name for a tensor; None for one that it computes itself."""
    if name in _OUTER:
        return _OUTER[name]
    if name.endswith(".rotary_emb.inv_freq"):
        return None
    begin, layer, rest = name.partition("layers.")[0], *name.partition("layers.")[2].split(".", 1)
    module, _, end = rest.rpartition(".")
    assert begin == "model."
    return f"blk.{layer}.{_INNER[module]}.{end}"


def _interleaved(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder rows of each head: llama.cpp rotates neighbours in Llama's heads, transformers one
    half with the other."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_tensor(writer: "GGUFWriter", tensor: _Tensor, kind: str) -> None:
    from gguf import GGMLQuantizationType, quants

    values = tensor.values
    if values.ndim == 1 or kind == "f32":
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
        return
    if kind == "q8_0" and values.shape[-1] % _Q8_ROW:
        kind = "f16"  # llama.cpp's tools do the same with rows that do not divide into its blocks
    if kind == "f16":
        writer.add_tensor(tensor.name, values.astype(np.float16))
        return
    wanted = GGMLQuantizationType[kind.upper()]
    writer.add_tensor(tensor.name, quants.quantize(values, wanted), raw_dtype=wanted)
