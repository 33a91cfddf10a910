"""What the tests of the command line share: a tiny run's options, texts to train on."""

from pathlib import Path

TINY = [
    *("--model.d-model", "16", "--model.n-heads", "2", "--model.context", "16"),
    *("--train.tokens-per-step", "64", "--train.batch-size", "2", "--train.steps", "4", "--train.eval-windows", "4"),
    *("--train.dtype", "fp32", "--train.threads", "1"),
]
R = 6
OPTIONS = {  # option -> (section, field, a value that is not the preset's)
    "--train.steps": ("train", "steps", 3),
    "--train.seed": ("train", "seed", 7),
    "--train.checkpoint-every": ("train", "checkpoint_every", 2),
    "--train.eval-every": ("train", "eval_every", 2),
    "--train.tokens-per-step": ("train", "tokens_per_step", 96),
    "--train.threads": ("train", "threads", 1),
    "--optim.lr": ("optim", "lr", 0.0125),
    "--model.gate-bias": ("model", "gate_bias", 0.5),
}


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.txt").write_text("".join(f"page {i}, line {j}: größer, naïve, 東京\n" for j in range(9)))
    return folder
