"""Small checkpoints of every family, without the packages that the parity tests need, and changed mmproj files."""

import json
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from safetensors.torch import save_file

from moonvit.encoder import Encoder
from moonvit.families import family_of
from moonvit.mmproj import export_gguf
from moonvit.presets import model_config, preprocessor_config
from moonvit.weights.source import local_checkpoint
from parity_helpers import K25_MEDIA, KIMI_VL_PIXELS, QWEN_PIXELS, kimi_geometry

QWEN2 = {
    "depth": 2, "embed_dim": 48, "hidden_size": 40, "num_heads": 2, "mlp_ratio": 2.5, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "quick_gelu",
}  # fmt: skip
QWEN25 = {
    "depth": 5, "hidden_size": 48, "out_hidden_size": 40, "num_heads": 2, "intermediate_size": 68,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [1, 3], "hidden_act": "silu",
}  # fmt: skip
QWEN3 = {
    "depth": 4, "hidden_size": 48, "out_hidden_size": 40, "num_heads": 2, "intermediate_size": 68,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 2], "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
KIMI = {**kimi_geometry(), "init_pos_emb_height": 6, "text_hidden_size": 40}
SQUARE = {**KIMI, "init_pos_emb_height": 8}

FAMILIES = {
    "kimi_k3": (model_config("tiny")["vision_config"], preprocessor_config()),
    "kimi_k25": (KIMI, {"media_proc_cfg": {**K25_MEDIA, "in_patch_limit": 12345}}),
    "kimi_vl": ({k: v for k, v in SQUARE.items() if k != "init_pos_emb_time"}, KIMI_VL_PIXELS),
    "qwen2_vl": (QWEN2, QWEN_PIXELS),
    "qwen2_5_vl": (QWEN25, {**QWEN_PIXELS, "max_pixels": 12845056}),
    "qwen3_vl": (QWEN3, {**QWEN_PIXELS, "patch_size": 16}),
}


def make(directory: Path, family: str, dtype: torch.dtype = torch.float32, **changes) -> Path:
    """A checkpoint with random weights, of that family's small geometry with some fields changed."""
    vision, pixels = FAMILIES[family]
    config = {"model_type": family, "vision_config": {**vision, **changes}}
    row = family_of(config)
    state = row.empty_model(row.vision(config, "config.json")).state_dict()
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, empty in state.items():
        values = torch.randn(empty.shape, generator=generator)
        scale = 0.2 if empty.ndim < 2 else 0.5 if "pos_e" in name else values[0].numel() ** -0.5
        norm = 1 if empty.ndim == 1 and name.endswith("weight") else 0
        tensors[name] = (values * scale + norm).to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels))
    save_file(tensors, directory / "model.safetensors")
    return directory


def maker(root: Path):
    """family -> (directory of a checkpoint, the mmproj file made of it, float32), each made once."""
    made = {}

    def get(family):
        if family not in made:
            directory, path = make(root / family, family), root / f"mmproj-{family}.gguf"
            export_gguf(local_checkpoint(directory), path, experimental=True)
            made[family] = directory, path
        return made[family]

    return get


def load(path: Path, dtype: str = "float32") -> Encoder:
    return Encoder.from_pretrained(path, dtype=dtype)


def assert_same(mine: Encoder, theirs: Encoder) -> None:
    for (name, a), b in zip(mine.model.state_dict().items(), theirs.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def keys_of(path: Path) -> dict:
    """{key: value} as the gguf package reads them."""
    fields = GGUFReader(path).fields.values()
    return {field.name: field.contents() for field in fields if not field.name.startswith("GGUF.")}


def rewritten(source: Path, target: Path, keys=None, tensors=None, more=None) -> Path:
    """The file written anew by the gguf package.

    Keys are changed, or go where they are None; `tensors` may change name, data and type of a tensor or drop
    it; `more` are further tensors.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "clip")
    keys = dict(keys or {})
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = keys.pop(field.name, field.contents())
        if value is not None:
            sub = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, value, field.types[0], sub)
    for name, value in ((n, v) for n, v in keys.items() if v is not None):
        kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(name, value)
    for tensor in reader.tensors:
        name, data, kind = tensor.name, np.array(tensor.data), tensor.tensor_type
        changed = tensors(name, data, kind) if tensors else (name, data, kind)
        if changed is not None:
            writer.add_tensor(changed[0], changed[1], raw_dtype=changed[2])
    for name, data in (more or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
