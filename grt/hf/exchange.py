"""Models out of grt and into it: what `grt export` and `grt import` do."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from grt.config import VERSION, DataConfig, Layout, ModelConfig, RunConfig, TrainConfig, config_hash, dump
from grt.data.tokenizer import get_tokenizer
from grt.data.tokenizer_json import FILE
from grt.errors import ConfigError
from grt.files import replace_file
from grt.methods import build_model
from grt.model import cost
from grt.model.convert import convert
from grt.runs.checkpoint import find_checkpoint, load_model, read_manifest, write_folder
from grt.runs.folder import command_line
from grt.runs.metrics import read_metrics
from grt.runs.paths import tokenizer_facts
from grt.schema import to_dict

COPIED = f"hf:./{FILE}"  # a tokenizer.json that comes along


def new_folder(out: Path) -> None:
    """Make it; ConfigError where something is there already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: give a new folder.")
    out.mkdir(parents=True, exist_ok=True)


# Out


def export_hf(run: Path, out: Path) -> None:
    """A folder that transformers loads, with tokenizer, remote code and a model card."""
    from grt.hf.card import model_card
    from grt.hf.export import write_model, write_tokenizer

    checkpoint, _ = find_checkpoint(run)
    model, config = load_model(checkpoint)
    tokenizer = get_tokenizer(config.data.tokenizer)
    new_folder(out)
    write_model(model, out, tokenizer.eot)
    write_tokenizer(tokenizer.json(), tokenizer.eot_text, config.model.context, out)
    card = model_card(config, cost.parameters(model)["total"], *records(checkpoint))
    (out / "README.md").write_text(card, encoding="utf-8")


def records(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """env.json of a checkpoint's run, and the run's evaluation at that step; each empty where there is none."""
    folder = checkpoint if (checkpoint / "config.json").exists() else checkpoint.parents[1]
    step, environment, rows = read_manifest(checkpoint)["step"], {}, []
    if (folder / "env.json").exists():
        environment = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    if (folder / "metrics.jsonl").exists():
        rows = read_metrics(folder / "metrics.jsonl")
    evaluations = [row for row in rows if row["kind"] == "eval" and row["step"] == step]
    return environment, evaluations[-1] if evaluations else {}


def export_onnx(run: Path, out: Path, depth: int | None) -> float:
    """model.onnx and the tokenizer; returns by how much its logits differ from ours."""
    from grt.hf.export import write_tokenizer
    from grt.hf.onnx import write_onnx

    model, config = load_model(run)
    tokenizer = get_tokenizer(config.data.tokenizer)
    new_folder(out)
    difference = write_onnx(model, out / "model.onnx", depth)
    write_tokenizer(tokenizer.json(), tokenizer.eot_text, config.model.context, out)
    return difference


# In


@dataclass
class Recurrent:
    """What to make of a dense model. tying: stepwise or average, of any method, or svd-lora: the average, and in the
    deltas of rrt, of this rank, the best of what it loses (grt/model/convert.py)."""

    layout: str
    method: str
    tying: str
    lora_rank: int

    def model(self, dense: ModelConfig) -> ModelConfig:
        """ConfigError where the dense model does not have as many layers as this executes blocks."""
        blocks, n_layers = Layout.parse(self.layout), dense.blocks.n_unique
        if blocks.is_dense or blocks.n_executions() != n_layers:
            raise ConfigError(
                f"--to {self.layout} executes {blocks.n_executions()} blocks and has "
                f"{'no core' if blocks.is_dense else 'a core'}, but GPT-2 has {n_layers} layers: give a layout p+nxR+c "
                f"with p + n R + c = {n_layers}."
            )
        fields: dict[str, Any] = to_dict(dense) | {"layout": self.layout, "method": self.method}
        if self.tying == "svd-lora":
            fields |= {"method": "rrt", "lora_rank": self.lora_rank}
        return ModelConfig(**fields)

    @property
    def how(self) -> str:
        """As grt/model/convert.py has it."""
        return "average" if self.tying == "svd-lora" else self.tying


def import_gpt2(folder: Path, out: Path, tokenizer: str, to: Recurrent | None) -> RunConfig:
    """A model folder with the weights of Hugging Face's GPT-2, dense as they are or tied into a core; tokenizer: "" is
    the one that its files say."""
    from grt.hf.gpt2 import read_gpt2

    dense, weights = read_gpt2(folder)
    shape = dense if to is None else to.model(dense)
    tokenizer = tokenizer or tokenizer_of(folder, dense.vocab_size)
    train = TrainConfig(tokens_per_step=TrainConfig.batch_size * dense.context)
    config = RunConfig(folder.resolve().name, shape, DataConfig(tokenizer=tokenizer), train=train)
    torch.manual_seed(train.seed)  # what a recurrent model has beyond GPT-2 begins afresh
    model = build_model(shape)
    notes: dict[str, Any] = {"grt": VERSION, "command": command_line(), "imported_from": config.name}
    if to is None:
        model.load_state_dict(weights)
    else:
        notes["tied"] = convert(model, weights, dense.blocks, to.how)
    new_folder(out)
    write_folder(out, {"model.safetensors": safetensors.torch.save(model.state_dict())}, config_hash(config), step=0)
    if tokenizer == COPIED:
        (out / FILE).write_bytes((folder / FILE).read_bytes())
        notes["tokenizer"] = tokenizer_facts(get_tokenizer(f"hf:{out / FILE}"))
    replace_file(out / "env.json", json.dumps(notes, indent=2) + "\n")
    replace_file(out / "config.json", dump(config))
    return config


def tokenizer_of(folder: Path, vocab_size: int) -> str:
    """gpt2, where the vocabulary is GPT-2's, or the folder's own tokenizer.json, which is to be copied."""
    gpt2 = get_tokenizer("gpt2")
    try:
        theirs = json.loads((folder / FILE).read_text(encoding="utf-8"))["model"]["vocab"]
    except FileNotFoundError:
        if vocab_size == gpt2.vocab_size:
            return gpt2.name
        raise ConfigError(
            f"{folder} has no {FILE}, and its {vocab_size} tokens are not GPT-2's: name a tokenizer with --tokenizer."
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / FILE} cannot be read ({error}): name a tokenizer with --tokenizer.") from None
    return gpt2.name if theirs == json.loads(gpt2.json())["model"]["vocab"] else COPIED
