"""Makes the check's development models, in a minute or two: ``python -m tools.media_check``.

Faces are drawn, some of their features are put into words, and for each pair of words and face the
models learn whether they fit: not whether those words were made for that face, since they may fit
many.
"""

import random
from dataclasses import replace

import torch
import torch.nn.functional as nn
from safetensors.torch import save_file

from clips.render.stages.face import BACKDROP, HAIR, SKIN, Look
from clips.render.stages.procedural import draw
from clips.render.stages.tiny_clip import CHANNELS, FOLDER, SIZE, TwoTowers, buckets_of

FACES = 1_500
STEPS = 1_200
BATCH = 96
_FILLERS = (
    "",
    "",
    "a friendly host",
    "a portrait of somebody",
    "person",
    "a woman",
    "a man",
    "presenter",
)


def random_look(rng: random.Random) -> Look:
    """A random face that can be drawn."""
    return Look(
        hair=rng.choice([*HAIR, ""]),
        skin=rng.choice(list(SKIN)),
        backdrop=rng.choice(list(BACKDROP)),
        has_glasses=rng.random() < 0.5,
        has_beard=rng.random() < 0.5,
    )


def facts_of(look: Look) -> frozenset[str]:
    """Everything that a prompt may say of ``look``."""
    facts = {f"hair {look.hair}", f"skin {look.skin}", f"in {look.backdrop}"}
    facts |= {"glasses"} if look.has_glasses else set()
    facts |= {"beard"} if look.has_beard else set()
    return frozenset(facts)


def some_words(look: Look, rng: random.Random) -> tuple[str, frozenset[str]]:
    """A random prompt that fits ``look``, and the facts that it states."""
    said = set()
    words = [rng.choice(_FILLERS)]  # "" too: short prompts are prompts
    for fact, text in (
        (f"hair {look.hair}", f"{look.hair} hair" if look.hair else "bald"),
        (f"skin {look.skin}", f"{look.skin} skin"),
        (f"in {look.backdrop}", f"{look.backdrop} background"),
        ("glasses", "with glasses" if look.has_glasses else ""),
        ("beard", "and a beard" if look.has_beard else ""),
    ):
        if text and rng.random() < 0.4:
            said.add(fact)
            words.append(text)
    return ", ".join(words), frozenset(said)


def pictures_of(looks: list[Look]) -> torch.Tensor:
    """Pictures ``[n, 3, SIZE, SIZE]``, 0 to 1, of ``looks``."""
    large = torch.empty(3, 2 * SIZE, 2 * SIZE)
    drawn = []
    for look in looks:
        draw(look, large)
        drawn.append(nn.interpolate(large[None], (SIZE, SIZE), mode="area")[0])
    return torch.stack(drawn)


def train(
    channels: tuple[int, ...], seed: int, looks: list[Look], faces: torch.Tensor
) -> TwoTowers:
    """Train a model on ``faces`` ``[n, 3, SIZE, SIZE]``, which show ``looks``."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = TwoTowers(channels)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    facts = [facts_of(look) for look in looks]
    for step in range(STEPS):
        chosen = rng.sample(range(len(looks)), BATCH)
        prompts = [some_words(looks[face], rng) for face in chosen]
        fits = torch.tensor(
            [[float(said <= facts[face]) for face in chosen] for _, said in prompts]
        )
        # Faces are moved and lit differently, like heads in a clip.
        pixels = faces[chosen] * (0.85 + 0.3 * torch.rand(BATCH, 1, 1, 1))
        pixels = pixels.roll((rng.randint(-2, 2), rng.randint(-2, 2)), (2, 3)).clamp(0, 1)
        text = model.text(_batch([text for text, _ in prompts]))
        logits = model.logits(text, model.picture(pixels))
        # Weighted so that pairs that fit count as much as those that do not.
        share = fits.mean().clamp(0.01, 0.99)
        weight = torch.where(fits > 0, 0.5 / share, 0.5 / (1 - share))
        loss = nn.binary_cross_entropy_with_logits(logits, fits, weight)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == STEPS - 1:
            right = ((logits > 0) == (fits > 0)).float().mean()
            print(f"step {step}: loss {loss.item():.3f}, right {right.item():.3f}", flush=True)
    return model


def _batch(prompts: list[str]) -> torch.Tensor:
    rows = [buckets_of(prompt) for prompt in prompts]
    longest = max(map(len, rows))
    return torch.tensor([row + [-1] * (longest - len(row)) for row in rows])


def main() -> None:
    """Train and save all models."""
    torch.set_num_threads(1)  # tensors are small: threads would wait for each other
    rng = random.Random(1)
    looks = [random_look(rng) for _ in range(FACES)]
    looks += [replace(look, has_glasses=False, has_beard=False) for look in looks[:100]]
    faces = pictures_of(looks)
    FOLDER.mkdir(exist_ok=True)
    for seed, (name, channels) in enumerate(CHANNELS.items()):
        print(name)
        model = train(channels, seed, looks, faces)
        save_file(model.state_dict(), FOLDER / f"{name}.safetensors")
