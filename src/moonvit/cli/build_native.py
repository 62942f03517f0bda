"""`moonvit build-native`."""

import sys

import click

from moonvit.cli import fail
from moonvit.native import build, cpu


@click.command("build-native")
def command() -> None:
    """Compile the native kernels into the cache, if they are not there yet, and print where they are.

    Otherwise the first encoder that can use them does it. Where this has run, a compiler is no longer needed.
    """
    path = build.library()
    click.echo(path)
    if reason := cpu.lacking():
        sys.exit(fail(f"they cannot run here: {reason}"))
