"""README's section of measurements, made from the JSON that commands printed.

    python dev/measured.py run NAME...      runs the commands of these names (below), alone on the machine, for results/
    python dev/measured.py                  writes the section into README.md

The peers' `training_peers` wants model.py of a checkout of karpathy/nanoGPT: NANOGPT=FILE. `serve_*` run in .venv-vllm.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from grt.config import load
from grt.methods import build_model
from grt.model.cost import parameters

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
MODELS = ("grt-nano", "dense-nano")
BEGIN, END = "<!-- measured: python dev/measured.py -->", "<!-- end of measured -->"

LATENCY = "bench latency --sizes small --protocol cached --batch 1 --prompt 128 --new 64 --alternations 25"
COMMANDS = {
    "models/grt-nano": "eval models/grt-nano --json",
    "models/dense-nano": "eval models/dense-nano --json",
    "bench/training": "bench training",
    "bench/training_peers": "bench training --peers nanogpt transformers --nanogpt NANOGPT",
    "bench/latency": f"{LATENCY} --dtype bf16",
    "bench/latency_bf16": f"{LATENCY} --dtype bf16 --weights bf16 --peers dense",
    "bench/latency_int8": f"{LATENCY} --dtype bf16 --weights int8 --peers dense",
    "bench/serve_small": "bench serve --size small --compile off --alternations 8",
    "bench/serve_medium": "bench serve --size medium --compile off --alternations 5",
}


def run(name: str) -> None:
    command = COMMANDS[name].replace("NANOGPT", os.environ.get("NANOGPT", "NANOGPT")).split()
    python = ROOT / ".venv-vllm/bin/python" if "serve" in name else sys.executable
    printed = subprocess.run([python, "-m", "grt", *command], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    report = json.loads(printed.stdout[printed.stdout.rindex("\n{") if "\n{" in printed.stdout else 0 :])
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def models() -> list[str]:
    lines = ["| model | layout | parameters | depth 0 | 1 | 3 | full | bits per byte |", "|---" * 8 + "|"]
    for name in MODELS:
        report, config = read(f"models/{name}"), load(ROOT / "models" / name / "config.json").model
        with torch.device("meta"):
            total = parameters(build_model(config))["total"]
        losses = {int(k): f"{loss:.4f}" for k, loss in report["loss_by_depth"].items()}
        full = max(losses)
        cells = [f"`{name}`", config.layout, f"{total:,}", *(losses.get(k, "") if full else "" for k in (0, 1, 3))]
        lines.append(f"| {' | '.join(cells)} | {losses[full]} | {report['depths'][str(full)]['bits_per_byte']:.4f} |")
    return lines


def ratio(report: dict[str, Any], name: str) -> str:
    """Median, and from the smallest to the largest of the alternations."""
    low, high = report["ratio_spreads"][name]
    return f"{report['ratios'][name]:.3f} ({low:.3f} - {high:.3f})"


def training() -> list[str]:
    rows = [(of, name) for of in ("bench/training", "bench/training_peers") for name in read(of)["ratios"]]
    lines = [f"| training, {machine(read('bench/training'))} | ratio |", "|---|---|"]
    return lines + [f"| {name} | {ratio(read(of), name)} |" for of, name in rows]


def decoding() -> list[str]:
    """Of small, batch 1."""
    first = read("bench/latency")
    lines = [
        f"| a token of small, {machine(first)} | GRT, ms | dense, ms | GRT / dense "
        "| dense / transformers' GPT-2, tokens/s |",
        "|---|---|---|---|---|",
    ]
    for of, how in (
        ("latency", "bf16, compiled"),
        ("latency_bf16", "`--weights bf16`"),
        ("latency_int8", "`--weights int8`"),
    ):
        report = read(f"bench/{of}")
        grt, dense = (next(row for row in report["rows"] if row["name"].startswith(name)) for name in ("grt", "dense"))
        ratios = {key: ratio(report, key) for key in report["ratios"]}
        cells = [
            next((text for key, text in ratios.items() if unit in key), "") for unit in ("ms per token", "tokens/s")
        ]
        times = [f"{row['ms_per_token']:.2f}" for row in (grt, dense)]
        lines.append(f"| {how} | {' | '.join([*times, *cells])} |")
    return lines


def serving() -> list[str]:
    first = read("bench/serve_small")
    lines = [
        f"| in vLLM, {first['requests']} requests, {first['prompt']} tokens and {first['new']} new ones, "
        f"{machine(first)} | tokens/s, GRT / GPT-2 | of what the FLOPs give |",
        "|---|---|---|",
    ]
    for size in ("small", "medium"):
        report = read(f"bench/serve_{size}")
        for name in report["ratios"]:
            peer = "our dense model" if name.endswith("dense") else "vLLM's own"
            lines.append(f"| {size}, {peer} | {ratio(report, name)} | {report['of_flops'][name]:.3f} |")
    return lines


def machine(report: dict[str, Any]) -> str:
    return f"{report['dtype']}, {report['device']}, {report['threads']} threads"


def section() -> str:
    grt, dense = (read(f"models/{name}")["loss_by_depth"] for name in MODELS)
    gap, gain = grt["6"] - dense["0"], grt["1"] - grt["6"]
    entropy = read("models/grt-nano")["bigram_entropy"]
    lines = [
        "Losses are nats per byte on the whole validation split of `builtin` (one seed; its bigram entropy is",
        f"{entropy:.4f}), of the bf16 weights in `models/`, each made by the one command in its README on two CPU",
        "cores: 4,000 steps of 4,096 bytes.",
        "", *models(), "",
        "![training curve of grt-nano](models/grt-nano/curve.png)", "",
        f"At this size and budget the dense model of equal block executions wins by {gap:.3f} nats, and depth pays",
        f"{gain:.3f} nats from depth 1 to 6. Sixteen million bytes are no test of what the paper claims at ten billion",
        "tokens. How the presets were found, and the dense models that beat GRT on the way: [dev/LOG.md](dev/LOG.md).",
        "All methods under one recipe: [results/methods](results/methods/README.md).", "",
        "Speed, as medians over alternations (smallest - largest):", "",
        *training(), "", *decoding(), "", *serving(), "",
        "The commands are those of [dev/measured.py](dev/measured.py), which makes this section of what they printed;",
        "how, and what failed, is in [dev/LOG.md](dev/LOG.md).",
    ]  # fmt: skip
    return "\n".join(lines)


def with_section(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{section()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        for name in sys.argv[2:]:
            run(name)
    else:
        readme = ROOT / "README.md"
        readme.write_text(with_section(readme.read_text(encoding="utf-8")), encoding="utf-8")
