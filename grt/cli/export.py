"""`grt export`: a trained model for others to load."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from grt.cli.options import Run, parse
from grt.errors import ConfigError

NO_GGUF = "--format gguf: its runtimes have no graph that applies a core again: use hf or onnx."


@dataclass
class Export:
    """Write a trained model as a folder that Hugging Face's transformers loads, or as an ONNX file."""

    run: Run
    """A run's folder, one of its checkpoints, or a model folder."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """A new folder."""
    format: Literal["hf", "onnx", "gguf"] = "hf"
    """hf: safetensors, tokenizer, model card and the code that computes it; onnx: one depth, no cache; gguf: not."""
    depth: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Of the ONNX file: passes through the core; default R. (With hf it is an argument of the model.)"""
    push: Annotated[str | None, tyro.conf.arg(metavar="REPO")] = None
    """Then upload the folder to this name on the hub."""
    dry_run: bool = False
    """With --push: only say what would be uploaded."""


def run_export(arguments: list[str]) -> int:
    command = parse(Export, arguments, "export")
    if command.format == "gguf":
        raise ConfigError(NO_GGUF)
    if command.depth is not None and command.format != "onnx":
        raise ConfigError("--depth is for --format onnx: in Hugging Face's, depth is an argument (num_steps).")
    if command.dry_run and command.push is None:
        raise ConfigError("--dry-run goes with --push: name the repository, or leave it out.")
    from grt.hf.exchange import export_hf, export_onnx

    if command.format == "onnx":
        difference = export_onnx(command.run, command.out, command.depth)
        print(f"logits in onnxruntime differ from torch's by at most {difference:.1e}")
    else:
        export_hf(command.run, command.out)
    files = sorted(path for path in command.out.rglob("*") if path.is_file())
    print(f"{command.out}: {len(files)} files, {sum(path.stat().st_size for path in files):,} bytes")
    if command.push is None:
        return 0
    if command.dry_run:
        print(f"would upload to {command.push}:")
        print("\n".join(f"  {path.relative_to(command.out)} {path.stat().st_size:,}" for path in files))
        return 0
    from grt.hf.hub import push

    print(push(command.out, command.push))
    return 0
