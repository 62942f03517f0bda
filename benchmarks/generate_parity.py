"""Greedy text of every family against the same model run wholly in transformers, as a table in Markdown.

    python benchmarks/generate_parity.py [--pictures 6] [--tokens 64]

Small random checkpoints, float32; prompts with one picture of random size, with several, with a video, and
conversations of three turns. The whole model computes with its own tower from our processor's pixels; Kimi-VL
is put together from nemo-automodel's tower and transformers' DeepSeek-V3. Logits are compared at every step.
"""

import argparse
import logging
import random
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import transformers  # noqa: E402

import engine_helpers as helpers  # noqa: E402
from engine_checkpoints import MAKERS, picture  # noqa: E402
from moonvit.engine import Clip  # noqa: E402


def conversations(pictures: int, family: str) -> list[list[list[object]]]:
    """For each conversation the media of its turns."""
    rng = random.Random(7)
    random_pictures = [picture(rng.randint(30, 260), rng.randint(30, 260), 100 + n) for n in range(pictures)]
    found = [[[picture]] for picture in random_pictures]
    found += [[media] for media in helpers.CASES.values()]
    found.append([[random_pictures[0]], [random_pictures[1]], []])
    found.append([[helpers.CLIP], [random_pictures[2]], []])
    if family == "kimi_vl":
        found = [turns for turns in found if not any(isinstance(m, Clip) for media in turns for m in media)]
    return found


def row(family: str, directory: Path, pictures: int, tokens: int) -> str:
    pair = helpers.make_pair(family, directory)
    replies = compared = same = 0
    worst = largest = 0.0
    kinds = set()
    for turns in conversations(pictures, family):
        chat = pair.generator.chat()
        for media in turns:
            reply = chat.ask("what is this?", pair.see(media), max_new_tokens=tokens)
            result = pair.compare(chat, reply.ids, tokens)
            replies += 1
            compared += len(result.expected)
            same += sum(a == b for a, b in zip(result.ids, result.expected, strict=False))
            kinds.update(result.expected)
            worst = max(worst, result.difference)
            largest = max(largest, float(result.expected_logits.abs().max()))
    return f"| {family} | {replies} | {compared} | {same} | {len(kinds)} | {worst:.1e} | {largest:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.captureWarnings(True)
    torch.set_num_threads(1)
    print("| family | replies | tokens | identical | distinct | largest logit difference | largest logit |")
    print("|---|---|---|---|---|---|---|")
    for family in MAKERS:
        with tempfile.TemporaryDirectory() as place:
            print(row(family, Path(place), arguments.pictures, arguments.tokens), flush=True)


if __name__ == "__main__":
    main()
