"""The published reference model on a mid-size random geometry, float32."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import random_pixels, relative_error
from moonvit.encoder import Encoder
from moonvit.presets import model_config
from moonvit.synthetic import make_checkpoint

BATCHES = [
    [(1, 16, 16)],
    [(1, 8, 22), (1, 30, 4)],
    [(1, 2, 2), (2, 6, 10), (1, 40, 36), (4, 4, 8)],
]


def reference_module():
    spec = importlib.util.find_spec("nemo_automodel")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package nemo-automodel is not installed (make test installs it)")
    path = Path(spec.submodule_search_locations[0]) / "components/models/kimi_k3/vision.py"
    spec = importlib.util.spec_from_file_location("kimi_k3_reference", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    torch._dynamo.config.disable = True
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Our encoder and the reference's tower and projector on the same random weights."""
    module = reference_module()
    directory = tmp_path_factory.mktemp("parity") / "mid"
    make_checkpoint(directory, "mid", seed=3)
    ours = Encoder.from_pretrained(directory, dtype="float32")
    from transformers import PretrainedConfig

    vision = model_config("mid")["vision_config"]
    config = PretrainedConfig(
        **{key.removeprefix("vt_"): value for key, value in vision.items()}, attn_implementation="eager"
    )
    config._attn_implementation = "eager"
    projector_config = SimpleNamespace(
        mm_hidden_size=vision["mm_hidden_size"],
        merge_kernel_size=vision["merge_kernel_size"],
        hidden_size=vision["text_hidden_size"],
        projector_ln_eps=vision["projector_ln_eps"],
    )
    tower = module.MoonViT3dPretrainedModel(config).eval()
    projector = module.PatchMergerMLPV2(projector_config).eval()
    tower.load_state_dict(ours.model.vision_tower.state_dict(), strict=True)
    projector.load_state_dict(ours.model.mm_projector.state_dict(), strict=True)
    yield ours, tower, projector
    torch._dynamo.config.disable = False


@pytest.mark.parametrize("grids", BATCHES, ids=str)
def test_float32(pair, grids):
    """Within 1e-5 of the reference's norm, and no token off in direction."""
    ours, tower, projector = pair
    pixels = random_pixels(grids, seed=1)
    with torch.no_grad():
        merged = tower(pixels, torch.tensor(grids))
        expected = projector(merged)
        our_merged = ours.model.vision_tower(pixels, grids)
        found = ours.model(pixels, grids)
    for mine, theirs in zip(our_merged, merged, strict=True):
        assert relative_error(mine, theirs.flatten(1)) < 1e-5
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) < 1e-5
        cosine = torch.nn.functional.cosine_similarity(mine.double(), theirs.double(), dim=-1)
        assert cosine.min() > 1 - 1e-9


def test_gradients(pair):
    ours, tower, projector = pair
    grids = [(1, 4, 6), (2, 2, 4)]
    pixels = random_pixels(grids, seed=2)
    sum(out.sin().sum() for out in projector(tower(pixels, torch.tensor(grids)))).backward()
    sum(out.sin().sum() for out in ours.model(pixels, grids)).backward()
    theirs = {f"vision_tower.{n}": p for n, p in tower.named_parameters()}
    theirs |= {f"mm_projector.{n}": p for n, p in projector.named_parameters()}
    for name, parameter in ours.model.named_parameters():
        assert relative_error(parameter.grad, theirs[name].grad) < 2e-5, name
