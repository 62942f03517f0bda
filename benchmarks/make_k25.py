"""A K2.5 checkpoint with the released geometry of its tower and random weights, as transformers writes it.

    python benchmarks/make_k25.py build/k25-random

Its text model is a small one: only the tower and the projector are for benchmarks.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from parity_helpers import DEEPSEEK_TEXT, K25_NATIVE_PIXELS  # noqa: E402


def main() -> None:
    from transformers.models.kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Kimi_K25ForConditionalGeneration(
        Kimi_K25Config(text_config={**DEEPSEEK_TEXT, "hidden_size": 7168})
    )
    for name, parameter in model.model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(0, 0.02)
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(K25_NATIVE_PIXELS, indent=2) + "\n")


if __name__ == "__main__":
    main()
