"""`moonvit verify`."""

import json
import sys
from dataclasses import asdict

import click

from moonvit.cli import options, printable
from moonvit.cli.info import describe_checkpoint
from moonvit.cli.progress import bar
from moonvit.weights.export import verify
from moonvit.weights.load import fingerprint
from moonvit.weights.source import find_checkpoint, local_checkpoint


@click.command("verify")
@click.argument("model", metavar="M")
@options.revision
@options.output_format("human", "json")
def command(model: str, revision: str | None, kind: str) -> None:
    """Read every vision tensor of M: names, shapes, types, finite values, content hash.

    The exit code is 1 if anything is wrong.
    """
    checkpoint = local_checkpoint(find_checkpoint(model, revision=revision))
    faults = list(describe_checkpoint(checkpoint)["faults"])
    with bar(checkpoint.nbytes, "B") as shown:
        tensors = list(verify(checkpoint, shown.update))
    faults += [f"{t.name}: {t.not_finite} values are NaN or infinite" for t in tensors if t.not_finite]
    digest = fingerprint(checkpoint)
    if kind == "json":
        rows = [asdict(tensor) for tensor in tensors]
        click.echo(json.dumps({"fingerprint": digest, "tensors": rows, "faults": faults}, indent=2))
    else:
        for fault in faults:
            click.echo(f"fault: {printable(fault)}")
        click.echo(f"{len(tensors)} tensors, {checkpoint.nbytes:,} bytes, {digest}")
        click.echo(f"{len(faults)} faults" if faults else "all right")
    sys.exit(1 if faults else 0)
