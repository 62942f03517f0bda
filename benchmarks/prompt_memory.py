"""Peak memory of `moonvit prompt` beside the text embedding of a released checkpoint, 163,840 rows of 7,168.

    python benchmarks/prompt_memory.py [--preset full] [PICTURE]

Makes a checkpoint in a temporary directory: a K3 tower with random weights (`--preset`, "tiny" but for the
text model's width, or the released geometry), a tokenizer of 163,584 ordinary tokens whose used ones are
spread over all of the range, and a text embedding of 2.3 GB that is a hole but for the rows the tokenizer can
ask for. Then the command line runs in a process of its own, once with pictures planned only and once whole,
and the system's own figure of its largest resident memory is printed, that of importing torch beside it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from base64 import b64encode
from pathlib import Path

import torch

from moonvit.config import VisionConfig
from moonvit.presets import model_config, preprocessor_config
from moonvit.synthetic import TOY_MARKS, random_tensor
from moonvit.towers.kimi_k3 import KimiK3Vision
from moonvit.weights.index import index_bytes
from moonvit.weights.load import expected_shapes
from moonvit.weights.writer import SafetensorsWriter

ROWS, WIDTH = 163_840, 7168
ORDINARY = ROWS - 256
STEP = ORDINARY // 256
TABLE = "language_model.model.embed_tokens.weight"


def write_tokenizer(directory: Path) -> None:
    """Single bytes at every 639th rank; between them tokens of four bytes that no merge leads to."""
    lines = []
    for rank in range(ORDINARY):
        byte, rest = divmod(rank, STEP)
        token = bytes([byte]) if rest == 0 and byte < 256 else b"\xff" + rank.to_bytes(3, "big")
        lines.append(b"%s %d\n" % (b64encode(token), rank))
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    added = {str(ORDINARY + number): {"content": mark} for number, mark in enumerate(TOY_MARKS)}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


def write_table(path: Path) -> None:
    """The table as a file with holes; rows of single bytes and of markers are random."""
    entry = {"dtype": "BF16", "shape": [ROWS, WIDTH], "data_offsets": [0, 2 * ROWS * WIDTH]}
    header = json.dumps({TABLE: entry}).encode()
    header += b" " * (-len(header) % 8)
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        for row in [*range(0, 256 * STEP, STEP), *range(ORDINARY, ORDINARY + len(TOY_MARKS))]:
            file.seek(start + 2 * row * WIDTH)
            values = torch.randn(WIDTH, generator=generator).to(torch.bfloat16)
            file.write(values.view(torch.uint8).numpy().tobytes())
        file.truncate(start + 2 * ROWS * WIDTH)


def write_checkpoint(directory: Path, preset: str) -> None:
    config = model_config(preset)
    config["vision_config"]["text_hidden_size"] = WIDTH
    config["text_config"] |= {"hidden_size": WIDTH, "vocab_size": ROWS}
    config["media_placeholder_token_id"] = ORDINARY + TOY_MARKS.index("<|media_pad|>")
    with torch.device("meta"):
        shapes = expected_shapes(KimiK3Vision(VisionConfig.from_dict(config)))
    with SafetensorsWriter(directory / "vision.safetensors") as writer:
        for name, shape in shapes.items():
            writer.add(name, random_tensor(name, shape, 0))
    write_table(directory / "text.safetensors")
    write_tokenizer(directory)
    places = {**dict.fromkeys(shapes, "vision.safetensors"), TABLE: "text.safetensors"}
    (directory / "model.safetensors.index.json").write_bytes(index_bytes(places, 0))
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor_config()))


def peak(*words: str) -> int:
    """Largest resident memory in MB of one process, by a small one that waits for it alone."""
    watch = (
        "import resource, subprocess, sys;"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", watch, *words], check=True, capture_output=True, text=True)
    return int(done.stdout) // (1024 if sys.platform == "linux" else 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("picture", nargs="?", default="examples/rocket.jpg")
    parser.add_argument("--preset", choices=["tiny", "mid", "full"], default="tiny")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_checkpoint(directory, arguments.preset)
        table = directory / "text.safetensors"
        size, blocks = table.stat().st_size, table.stat().st_blocks
        print(f"text embedding: {size / 1e9:.2f} GB, {blocks / 2048:.0f} MB on disk")
        moonvit = [sys.executable, "-m", "moonvit"]
        asked = ["prompt", str(directory), "What is this?", arguments.picture]
        output = str(directory / "prompt.safetensors")
        for what, words in (
            ("importing torch", [sys.executable, "-c", "import torch"]),
            ("prompt, ids and slots only", [*moonvit, *asked]),
            (f"prompt -o, {arguments.preset} tower", [*moonvit, *asked, "-o", output]),
        ):
            print(f"{what}: {peak(*words)} MB")


if __name__ == "__main__":
    main()
