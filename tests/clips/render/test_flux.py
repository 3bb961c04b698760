"""Portraits by FLUX.1-schnell, with a tiny one of random weights (``tidegate[slot-flux]``)."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from clips.plan.recipe import Portrait, Recipe
from clips.render.stages.flux import FRAMING, FluxOptions, FluxPortrait, FluxPrecision
from worker.errors import BrokenCheckpoint, LoadError

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that diffusers imports
pytest.importorskip("diffusers", reason="portraits by FLUX: tidegate[slot-flux]")

CPU = torch.device("cpu")
RECIPE = Recipe("1.0", "Hi", portrait=Portrait("a friendly host", seed=5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.clips.render.checkpoints import save_flux

    return save_flux(tmp_path_factory.mktemp("flux") / "schnell")


def small(precision: FluxPrecision = "fp32") -> FluxOptions:
    return FluxOptions(precision, least_size=32)


def drawn(
    provider: FluxPortrait, recipe: Recipe = RECIPE, size: int = 64
) -> tuple[torch.Tensor, list[float]]:
    actor, shares = torch.full((3, size, size), -1.0), []
    with torch.inference_mode():
        provider.render(recipe, actor, shares.append)
    return actor, shares


def test_it_draws_what_the_pipeline_of_diffusers_draws(folder: Path) -> None:
    from diffusers import FluxPipeline

    provider = FluxPortrait.load(CPU, str(folder), small())
    actor, shares = drawn(provider)
    pipe = FluxPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    expected = pipe(
        FRAMING + "a friendly host",
        num_inference_steps=4,
        guidance_scale=0.0,
        height=64,
        width=64,
        max_sequence_length=256,
        generator=torch.Generator().manual_seed(5),
        output_type="pt",
    ).images[0]
    torch.testing.assert_close(actor, expected, atol=1e-4, rtol=1e-4)
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[-1] == 1.0
    # Each denoising step, each block of each network, and the decoder's.
    assert {0.2, 0.4, 0.6, 0.8} <= set(shares)
    assert len(shares) == 2 + 2 + 4 * (3 + 1) + 4


def test_no_prompt_is_in_the_log(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """However long: diffusers says of its own accord what it has cut off."""
    provider = FluxPortrait.load(CPU, str(folder), small())
    capfd.readouterr()
    caplog.clear()
    drawn(provider, Recipe("1.0", "Hi", portrait=Portrait("a zebra " * 60)))
    written = capfd.readouterr()
    assert "zebra" not in written.out + written.err + caplog.text


def test_a_step_ends_it_and_the_next_one_is_whole(folder: Path) -> None:
    provider = FluxPortrait.load(CPU, str(folder), small())
    whole, _ = drawn(provider)
    actor = torch.full((3, 64, 64), -1.0)
    for last in (0.0, 0.4, 0.8):
        asked = []

        def step(done: float, last: float = last, asked: list[float] = asked) -> None:
            asked.append(done)
            if done >= last:
                raise KeyboardInterrupt

        with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
            provider.render(RECIPE, actor, step)
        assert asked[-1] == last and float(actor.max()) == -1
    assert torch.equal(drawn(provider)[0], whole)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nf4"])
def test_precisions_take_less_and_draw_nearly_the_same(
    folder: Path, precision: FluxPrecision
) -> None:
    if precision == "nf4":
        pytest.importorskip("bitsandbytes", reason="FLUX in four bits: tidegate[slot-flux]")
    whole = FluxPortrait.load(CPU, str(folder), small())
    less = FluxPortrait.load(CPU, str(folder), small(precision))
    sizes = [provider.residents()[0].bytes for provider in (whole, less)]
    assert sizes[1] < {"bf16": 0.51, "fp8": 0.45, "nf4": 0.45}[precision] * sizes[0]
    assert [each.precision for each in less.residents()] == [precision, "bf16", "bf16"]
    apart = (drawn(whole)[0] - drawn(less)[0]).abs().mean()
    assert apart < {"bf16": 0.03, "fp8": 0.08, "nf4": 0.15}[precision]


def test_what_is_wrong_with_a_folder_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="flux of TIDEGATE_SLOT__FOLDERS is not set"):
        FluxPortrait.load(CPU, "", small())
    (tmp_path / "empty").mkdir()
    with pytest.raises(BrokenCheckpoint, match=r"lacks scheduler/.*, transformer/config\.json"):
        FluxPortrait.load(CPU, str(tmp_path / "empty"), small())
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "transformer" / "config.json").read_text())
    (copy / "transformer" / "config.json").write_text(json.dumps(config | {"num_layers": 2}))
    with pytest.raises(BrokenCheckpoint, match="lacks the weights"):
        FluxPortrait.load(CPU, str(copy), small())
