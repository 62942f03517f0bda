"""Importing costs nothing: no socket, no file, no torch; every public name resolves."""

import subprocess
import sys

import moonvit

WATCHED = """
import sys
touched = []
def watch(event, args):
    if event.startswith("socket.") or event in ("subprocess.Popen", "os.system"):
        touched.append((event, str(args)))
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        touched.append((event, str(args)))
sys.dont_write_bytecode = True
sys.addaudithook(watch)
import moonvit
assert not touched, touched
heavy = {"torch", "numpy", "PIL", "huggingface_hub", "safetensors", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_touches_nothing():
    run(WATCHED)


def test_importing_everything_opens_no_socket_and_writes_nothing():
    names = (
        "import moonvit.encoder, moonvit.synthetic, moonvit.cli.encode, moonvit.cli.info, moonvit.cli.count"
    )
    code = WATCHED.replace(
        "import moonvit\n",
        "import torch, numpy, PIL.Image, huggingface_hub, tqdm\ntouched.clear()\n" + names + "\n",
    )
    run(code.split("heavy =")[0])


def test_help_does_not_import_torch():
    run(
        "import sys\nfrom moonvit.cli import group\n"
        "group.main(['--help'], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )


def test_public_names_resolve():
    for name in moonvit.__all__:
        assert getattr(moonvit, name) is not None
    assert set(moonvit.__all__) <= set(dir(moonvit))


def test_unknown_name():
    run(
        "import moonvit\ntry:\n    moonvit.nothing\nexcept AttributeError as e:\n    assert 'nothing' in str(e)\nelse:\n    raise SystemExit(1)"
    )
