"""From a cold start to the first token, and where the time goes, on small random checkpoints.

    python benchmarks/generate_start.py [--runs 3]

For each family `moonvit generate` is run in a new process, and the time is taken until the first byte of the
reply; a second process does the same step by step and says what each took. Medians. The checkpoints are so
small that what remains is the fixed cost: Python, torch and transformers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "examples" / "rocket.jpg"

STEPS = """
import json, os, sys, time
began = float(os.environ["BEGAN"])
marks = {}
def mark(name):
    marks[name] = time.time() - began
mark("python")
import torch
mark("torch")
import moonvit.engine.generator as engine
mark("moonvit")
from moonvit.engine.families import text_family
from moonvit.engine.library import transformers_module
transformers_module(text_family(sys.argv[3]).module)
mark("transformers")
generator = engine.Generator.from_pretrained(sys.argv[1], dtype="float32")
mark("open")
stream = generator.stream("What is this?", sys.argv[2], max_new_tokens=1)
mark("picture and tower")
generator.load()
mark("text weights")
stream.reply
mark("prefill")
print(json.dumps(marks))
"""
STAGES = (
    "python",
    "torch",
    "moonvit",
    "transformers",
    "open",
    "picture and tower",
    "text weights",
    "prefill",
)


def first_byte(directory: Path) -> float:
    """Seconds until `moonvit generate` has written something."""
    command = [sys.executable, "-m", "moonvit", "generate", str(directory), "What is this?", str(PICTURE)]
    began = time.time()
    done = subprocess.Popen(
        [*command, "--dtype", "float32", "--max-new-tokens", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert done.stdout is not None
    assert done.stdout.read(1)
    seconds = time.time() - began
    done.communicate()
    return seconds


def stages(directory: Path, family: str) -> dict[str, float]:
    """Seconds of each stage."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(directory), str(PICTURE), family],
        capture_output=True,
        check=True,
        env=os.environ | {"BEGAN": repr(time.time())},
    )
    marks = json.loads(done.stdout.splitlines()[-1])
    before = [0.0, *(marks[stage] for stage in STAGES)]
    return {stage: marks[stage] - start for stage, start in zip(STAGES, before, strict=False)}


def make(directory: Path) -> None:
    """All checkpoints, in a process of its own that leaves nothing behind."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import pathlib, engine_checkpoints as helpers\n"
        "for family, make in helpers.MAKERS.items():\n"
        "    make(pathlib.Path(sys.argv[1]) / family)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    runs = range(parser.parse_args().runs)
    print(f"| family | first byte, s | {' | '.join(STAGES)} |")
    print("|---" * (len(STAGES) + 2) + "|")
    with tempfile.TemporaryDirectory() as place:
        make(Path(place))
        for directory in sorted(Path(place).iterdir()):
            family = directory.name
            total = statistics.median(first_byte(directory) for _ in runs)
            found = [stages(directory, family) for _ in runs]
            cells = (f"{statistics.median(one[stage] for one in found):.2f}" for stage in STAGES)
            print(f"| {family} | {total:.2f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
