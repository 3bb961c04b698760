"""Train the demo model from nothing: ``python -m tools.demo_model.train --out DIR``.

The whole corpus comes from `grammar` and `dialogue`, so a seed is the only input. The budget is
wall-clock time: phases and the learning rate follow the share of the minutes that has passed, and
a slower machine ends with fewer tokens, not with a broken schedule.

Fixed phrases are easy, and a name that comes back 30 tokens later is hard: trained on stories
alone for a quarter of an hour, the model writes fluent sentences about a new character each. So it
begins with reading exercises, keeps a share of them until it can look names up in stories as well,
and meets one document at a time. Only the last part packs rows of 2048 tokens, so that text stays
legible at every position.

Needs torch, tokenizers and transformers (whose `LlamaForCausalLM` holds the parameters).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_model import dialogue, grammar, words
from tools.demo_model.corpus import Batch, Corpus
from tools.demo_model.tokenizer import (
    BOS,
    END,
    END_OF_TEXT,
    save_tokenizer,
    train_tokenizer,
)

CONTEXT: Final = 2048


@dataclass(frozen=True)
class Phase:
    """A part of the training, up to `until` (a share of the time budget).

    `drills` is the share of documents that are nothing but reading exercises; `packed` tells
    whether rows are full contexts or single documents.
    """

    until: float
    drills: float
    packed: bool = False


PHASES: Final = (
    Phase(0.06, drills=1.0),
    Phase(0.22, drills=0.55),
    Phase(0.50, drills=0.3),
    Phase(0.85, drills=0.1),
    Phase(1.00, drills=0.04, packed=True),
)


def loss_of(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Weighted mean cross-entropy in nats per token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch.inputs, use_cache=False).logits
    each = cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
    weights = batch.weights.flatten()
    return (each * weights).sum() / weights.sum()


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """About 3.3 million parameters: narrow, shallow, two KV heads for four query heads."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=None,
    )


@torch.no_grad()
def initialise(model: LlamaForCausalLM) -> None:
    """Start the model where copying is easy; with the default start it takes too long to emerge.

    Token vectors begin large, so that a name keeps an identity of its own next to what all names
    share. Every head's output matrix begins as the transpose of its value matrix: a head then
    raises the logits of the tokens that it looks at (the vectors are tied), and training only has
    to learn where to look.
    """
    config = model.config
    model.model.embed_tokens.weight.normal_(std=0.1)
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    groups = config.num_attention_heads // kv_heads
    for layer in model.model.layers:
        value = layer.self_attn.v_proj.weight  # [kv_heads * head_dim, hidden]
        value.normal_(std=config.hidden_size**-0.5)
        per_head = value.view(kv_heads, -1, config.hidden_size)
        shared = per_head.repeat_interleave(groups, dim=0).flatten(0, 1)
        layer.self_attn.o_proj.weight.copy_(0.5 * shared.T)


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for vectors, embeddings and the query and key matrices.

    Muon grows a matrix at the same pace in every direction. Llama has no norm on queries and keys,
    so under Muon its attention scores soon saturate to one-hot and nothing is looked up any more.
    """
    matrices, scores, others = [], [], []
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            scores.append(parameter)
        elif parameter.ndim == 2 and "embed" not in name:
            matrices.append(parameter)
        else:
            others.append(parameter)
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(scores, lr=1.5e-3, betas=(0.9, 0.98), weight_decay=0.05),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate(share: float, step: int) -> float:
    """Learning-rate factor: 50 steps of warm-up, flat, then linear to zero from 40 percent on."""
    return min(1.0, (step + 1) / 50) * min(1.0, max(0.0, (1.0 - share) / 0.6))


def schedule(corpus: Corpus, budget_s: float) -> Iterator[tuple[float, Batch]]:
    """Yield the share of the time budget that has passed and the next batch, until it is spent."""
    start = time.monotonic()
    share = 0.0
    while share < 1.0:
        phase = next(phase for phase in PHASES if share < phase.until)
        if phase.packed:
            ready = iter((corpus.packed_batch(phase.drills, rows=2, length=CONTEXT),))
        else:
            ready = corpus.sorted_batches(phase.drills)
        for batch in ready:
            share = (time.monotonic() - start) / budget_s
            if share >= phase.until:
                break
            yield share, batch


def train(
    tokenizer: Tokenizer, budget_s: float, seed: int, keep: Callable[[LlamaForCausalLM], None]
) -> tuple[LlamaForCausalLM, int]:
    """Train for `budget_s` seconds; return the model and the number of target tokens seen.

    `keep` is called every 250 steps, so that a run that is cut short leaves something behind.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_config(tokenizer))
    initialise(model)
    steppers = optimizers(model)
    peaks = [stepper.param_groups[0]["lr"] for stepper in steppers]
    corpus = Corpus(tokenizer, f"train {seed}")
    seen, recent = 0, 0.0
    for step, (share, batch) in enumerate(schedule(corpus, budget_s)):
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper, peak in zip(steppers, peaks, strict=True):
            stepper.param_groups[0]["lr"] = peak * rate(share, step)
            stepper.step()
            stepper.zero_grad()
        seen += int((batch.weights > 0).sum())
        recent += loss.item() / 50
        if step % 50 == 49:
            print(
                f"{share:6.1%}  step {step + 1:5d}  tokens {seen:9d}  loss {recent:.4f}", flush=True
            )
            recent = 0.0
        if step % 250 == 249:
            keep(model)
    return model, seen


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int) -> float:
    """Nats per token on 16 packed rows of full context, from a seed that training never used.

    Here a looked-up token counts like any other; what the user types still counts little.
    """
    corpus = Corpus(tokenizer, f"held out {seed}")
    losses = []
    for _ in range(8):
        batch = corpus.packed_batch(drills=0.0, rows=2, length=CONTEXT)
        losses.append(loss_of(model, batch._replace(weights=batch.weights.clamp(max=1.0))).item())
    return sum(losses) / len(losses)


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16, tied head)."""
    config = model.config
    bos = tokenizer.token_to_id(BOS)
    eos = [tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)]
    # Written by hand: the classic key names (rope_theta, torch_dtype) are the ones that every
    # loader reads.
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos[0]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Command line; prints the held-out loss before and after rounding to bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--minutes", type=float, default=15.0, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=2048, help="most tokenizer entries")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)

    rng = Random(f"tokenizer {args.seed}")
    texts = [grammar.plain_document(rng) for _ in range(3000)]
    texts += [turn.text for _ in range(3000) for turn in dialogue.chat(rng)]
    # One token per name and thing, so that the model copies them instead of spelling them.
    texts += [f" {word}" for word in words.GIRLS + words.BOYS + words.THINGS for _ in range(200)]
    tokenizer = train_tokenizer(texts, args.vocab)
    save_tokenizer(tokenizer, args.out, CONTEXT)

    model, seen = train(
        tokenizer,
        args.minutes * 60,
        args.seed,
        keep=lambda model: save_model(model, tokenizer, args.out),
    )
    print(f"parameters {sum(p.numel() for p in model.parameters())}  tokens {seen}")
    print(f"held-out loss, float32 weights: {evaluate(model, tokenizer, args.seed):.4f}")
    save_model(model, tokenizer, args.out)
    for tensor in model.parameters():
        tensor.data = tensor.data.to(torch.bfloat16)
    print(f"held-out loss, bfloat16 weights: {evaluate(model, tokenizer, args.seed):.4f}")


if __name__ == "__main__":
    main()
