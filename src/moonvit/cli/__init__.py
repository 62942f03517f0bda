"""The command line: one file a verb, imported when called."""

import logging
import os
import signal
import sys
import warnings
from importlib import import_module
from typing import NoReturn

import click

from moonvit._version import __version__
from moonvit.errors import MoonvitError, WeightsError

VERBS = {
    "encode": "Encode pictures into embeddings.",
    "generate": "Answer a question about pictures, with the checkpoint's own text model.",
    "info": "Show what a checkpoint holds, and what it lacks.",
    "count": "Count the tokens of pictures from their headers.",
    "prompt": "Make a prompt with pictures: ids, slots, embeddings for an engine.",
    "fetch": "Fetch the vision half of a repository.",
    "export": "Write the vision half as a checkpoint of its own.",
    "verify": "Read every vision tensor and hash it.",
    "make-checkpoint": "Write a checkpoint with random weights to try things out.",
    "trace": "Write every stage of the tower for a picture to a file.",
    "compare": "Compare another program's stages with a trace.",
    "diagnose": "Name the mistake behind another program's wrong stages.",
    "bench": "Time the tower beside this machine's matrix product.",
    "selftest": "Check the tower against an independent float64 implementation.",
    "build-native": "Compile the native kernels into the cache.",
    "doctor": "Show versions, processor features and cache places.",
}

_FAULTS_SHOWN = 10


class Verbs(click.Group):
    """Verbs whose modules, and with them torch, are imported only when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command = import_module(f"moonvit.cli.{name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="moonvit")
def group() -> None:
    """The vision encoder of Kimi K3 and K3.1: pictures in, embeddings out.

    Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 bad input, 2 wrong usage.
    MOONVIT_DEBUG=1 shows tracebacks.
    """


def main() -> NoReturn:
    """Run the command line; an error becomes one line on stderr."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read once by torch: huge pages, see docs/speed.md
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("moonvit.native").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # whatever matters becomes an error of ours
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # unfinished files are removed, as for Ctrl-C
    debug = os.environ.get("MOONVIT_DEBUG", "") not in ("", "0")
    try:
        group.main(prog_name="moonvit", standalone_mode=False)
        sys.exit(0)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(fail("interrupted", code=130))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if debug:
            raise
        sys.exit(fail(one_line(error)))


def one_line(error: BaseException) -> str:
    """The error as one line; a long list of faults is cut, with a word on where the rest is."""
    if isinstance(error, WeightsError) and len(error.faults) > 1:
        shown = "; ".join(error.faults[:_FAULTS_SHOWN])
        rest = len(error.faults) - _FAULTS_SHOWN
        more = f"; and {rest} more" if rest > 0 else ""
        return f"{error.where}: {len(error.faults)} faults: {shown}{more} ({error.hint})"
    if isinstance(error, MoonvitError):
        return " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return "out of memory (fewer or smaller pictures at once: --batch-size, --max-tokens)"
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str) -> str:
    """The text with whatever could steer a terminal written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def fail(message: str, code: int = 1) -> int:
    """Say what went wrong on stderr; gives back the exit code."""
    click.echo(f"error: {printable(message)}", err=True)
    return code
