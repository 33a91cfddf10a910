"""`grt import`: another library's model as one of ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from grt.cli.options import parse


@dataclass
class Import:
    """Read a Hugging Face GPT-2 (safetensors) into a model folder: dense, or tied into a recurrent core."""

    kind: Annotated[tyro.conf.Positional[Literal["gpt2"]], tyro.conf.arg(metavar="gpt2")]
    """What the folder holds."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """A folder that save_pretrained has written, or a downloaded one."""
    out: Path
    """A new folder; it works wherever a run does."""
    to: Annotated[str | None, tyro.conf.arg(metavar="LAYOUT")] = None
    """Tie the layers into a recurrent model of this layout, p+nxR+c with p + n R + c = the number of layers."""
    tying: Literal["stepwise", "average", "svd-lora"] = "average"
    """With --to, what a core block begins as: one of the layers that it stands for, their mean, or that mean and in
    rrt's deltas what it loses of each."""
    method: str = "grt"
    """With --to: the method of the recurrent model (rrt with svd-lora)."""
    lora_rank: int = 8
    """With svd-lora: rank of the deltas."""
    tokenizer: str = ""
    """As in `grt prepare`; empty: GPT-2's, or the folder's tokenizer.json."""


def run_import(arguments: list[str]) -> int:
    command = parse(Import, arguments, "import")
    from grt.hf.exchange import Recurrent, import_gpt2

    to = None if command.to is None else Recurrent(command.to, command.method, command.tying, command.lora_rank)
    config = import_gpt2(command.folder, command.out, command.tokenizer, to)
    print(f"{command.out}: {config.model.method_name} {config.model.layout}, tokenizer {config.data.tokenizer}")
    return 0
