"""Pack a finished run into a model folder of at most 3 MB: `python dev/pack_model.py RUN FOLDER`.

Weights in bf16 (compressed where they would not fit), config, environment, the evaluations and every 20th training row,
the curve, a sample, and a README with the command and the loss at each depth of what was packed.
"""

import json
import shutil
import sys
from pathlib import Path

import safetensors.torch
import torch
import zstandard

from grt.config import config_hash, load
from grt.evals.report import evaluation_report
from grt.runs.checkpoint import find_checkpoint, load_model, read_manifest, write_folder
from grt.runs.metrics import read_metrics

LIMIT = 3_000_000


def pack(run: Path, folder: Path) -> None:
    checkpoint, config = find_checkpoint(run)
    model, _ = load_model(checkpoint)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    name, data = "model.safetensors", safetensors.torch.save(weights)
    if len(data) > 0.9 * LIMIT:
        name, data = name + ".zst", zstandard.ZstdCompressor(level=19).compress(data)
    write_folder(folder, {name: data}, config_hash(config), read_manifest(checkpoint)["step"])
    for file in ("config.json", "env.json", "curve.png"):
        shutil.copy(run / file, folder / file)
    rows = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] != "train" or r["step"] % 20 in (0, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    describe(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size <= LIMIT, f"{folder} has {size} bytes"
    print(f"{folder}: {size:,} bytes")


def describe(folder: Path) -> None:
    config = load(folder / "config.json")
    environment = json.loads((folder / "env.json").read_text())
    report = evaluation_report(folder)
    lines = [
        f"# {config.name}", "",
        f"{config.model.method_name} {config.model.layout}, trained on the `{config.data.path}` corpus by", "",
        "```", environment["command"], "```", "",
        f"at commit {environment['commit']} on {environment['cpu']}, {environment['threads']} threads, "
        f"{environment['dtype']}, torch {environment['torch']}, seed {config.train.seed}.", "",
        f"Loss of these bf16 weights on the whole validation split ({report['windows']:,} windows, fp32 arithmetic; "
        f"bigram entropy {report['bigram_entropy']:.4f}):", "",
        "| depth | loss (nats per byte) | bits per byte |", "|---|---|---|",
        *(f"| {k} | {row['loss']:.4f} | {row['bits_per_byte']:.4f} |" for k, row in report["depths"].items()), "",
    ]  # fmt: skip
    (folder / "README.md").write_text("\n".join(lines))


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
