"""Train the demo model from nothing: ``python -m worker.demo_model.train --out DIR``.

The whole corpus comes from `grammar` and `dialogue`, so a seed is the only input. The budget is
wall-clock time: the learning rate follows the share of the minutes that has passed, and a slower
machine ends with fewer tokens, not with a broken schedule. It begins with short reading
exercises, which teach attention to look names up: without them, a run of this length ends with
fluent sentences about a different character each. Rows grow to 2048 tokens in the last part, so
that text stays legible at every position. Rows are packed: documents follow each other, as they do
when a client ignores the end of a text.

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
from typing import Final, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from worker.demo_model import dialogue, grammar, words
from worker.demo_model.tokenizer import BOS, END, END_OF_TEXT, save_tokenizer, train_tokenizer

CONTEXT: Final = 2048
# What the user types counts little: nobody needs the model to invent typos.
USER_WEIGHT: Final = 0.2


@dataclass(frozen=True)
class Phase:
    """Rows of one shape, used until `until` (a share of the time budget) has passed.

    `drills` is the share of documents that are nothing but reading exercises.
    """

    until: float
    rows: int
    length: int
    drills: float = 0.0


PHASES: Final = (
    Phase(0.12, 12, 64, drills=0.7),
    Phase(0.65, 6, 256, drills=0.15),
    Phase(0.85, 4, 512, drills=0.05),
    Phase(1.0, 2, CONTEXT),
)


class Document(NamedTuple):
    """Token ids and how much each one counts as a target."""

    ids: list[int]
    weights: list[float]


class Batch(NamedTuple):
    """Inputs and targets [rows, length] int64, weights [rows, length] float32."""

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def document(rng: Random, tokenizer: Tokenizer, drills: float = 0.0) -> Document:
    """One document of the corpus, encoded; see `tokenizer` for the layout."""
    ids: list[int] = []
    weights: list[float] = []

    def put(text: str, weight: float) -> None:
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids.extend(piece)
        weights.extend([weight] * len(piece))

    if rng.random() < drills:
        put(BOS + grammar.exercise_document(rng) + END_OF_TEXT, 1.0)
        return Document(ids, weights)
    if rng.random() < 0.4:
        opening = BOS if rng.random() < 0.7 else ""
        put(opening + grammar.plain_document(rng) + END_OF_TEXT, 1.0)
        return Document(ids, weights)
    put(BOS, 1.0)
    for turn in dialogue.chat(rng):
        put(f"<|{turn.role}|>", 1.0)
        # Encoded apart, as the chat template's special tokens split the text at serving time too.
        put(turn.text, 1.0 if turn.role == "assistant" else USER_WEIGHT)
        put(END, 1.0)
    return Document(ids, weights)


def batches(rng: Random, tokenizer: Tokenizer) -> Callable[[Phase], Batch]:
    """A source of packed batches; every row begins at the beginning of a document."""

    def batch(phase: Phase) -> Batch:
        ids, weights = [], []
        for _ in range(phase.rows):
            row = Document([], [])
            while len(row.ids) <= phase.length:
                more = document(rng, tokenizer, phase.drills)
                row.ids.extend(more.ids)
                row.weights.extend(more.weights)
            ids.append(row.ids[: phase.length + 1])
            weights.append(row.weights[1 : phase.length + 1])
        tokens = torch.tensor(ids)
        return Batch(tokens[:, :-1], tokens[:, 1:], torch.tensor(weights))

    return batch


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
        torch.optim.Muon(matrices, lr=0.015, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(scores, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate(share: float, step: int) -> float:
    """Learning-rate factor: 50 steps of warm-up, flat, then linear to zero from half time on."""
    return min(1.0, (step + 1) / 50) * min(1.0, max(0.0, (1.0 - share) / 0.5))


def progress(budget_s: float) -> Iterator[float]:
    """Yield the share of the time budget that has passed, until it is spent."""
    start = time.monotonic()
    while (share := (time.monotonic() - start) / budget_s) < 1.0:
        yield share


def train(
    tokenizer: Tokenizer, budget_s: float, seed: int, keep: Callable[[LlamaForCausalLM], None]
) -> tuple[LlamaForCausalLM, int]:
    """Train for `budget_s` seconds; return the model and the number of tokens seen.

    `keep` is called every 500 steps, so that a run that is cut short leaves something behind.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_config(tokenizer))
    initialise(model)
    steppers = optimizers(model)
    peaks = [group["lr"] for stepper in steppers for group in stepper.param_groups]
    source = batches(Random(seed), tokenizer)
    seen, recent = 0, 0.0
    for step, share in enumerate(progress(budget_s)):
        phase = next(phase for phase in PHASES if share < phase.until)
        loss = loss_of(model, source(phase))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper, peak in zip(steppers, peaks, strict=True):
            stepper.param_groups[0]["lr"] = peak * rate(share, step)
            stepper.step()
            stepper.zero_grad()
        seen += phase.rows * phase.length
        recent += loss.item() / 50
        if step % 50 == 49:
            print(
                f"{share:6.1%}  step {step:5d}  tokens {seen:9d}  loss {recent:.4f}",
                flush=True,
            )
            recent = 0.0
        if step % 500 == 499:
            keep(model)
    return model, seen


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int) -> float:
    """Loss on 16 rows of full context that training never saw (another seed)."""
    source = batches(Random(f"held out {seed}"), tokenizer)
    return sum(loss_of(model, source(PHASES[-1])).item() for _ in range(8)) / 8


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
