"""The subcommands of `grt`, one file each: NAME.py holds a dataclass, whose fields are its options, and run_NAME.
A file is imported when its subcommand runs, and imports torch in its function: every --help answers at once."""

COMMANDS = {
    "prepare": "turn text into token shards",
    "train": "train a preset or a config",
    "eval": "loss of a trained model at each depth",
    "generate": "continue a text",
    "calibrate": "find the threshold at which tokens leave the loop",
    "info": "parameters, FLOPs and memory of a preset or a run",
    "list": "presets, methods, and runs under a folder",
    "compare": "put runs side by side: cost and loss",
    "paper": "run the paper's comparisons or one's own, build their tables",
    "export": "a trained model for Hugging Face or as ONNX",
    "import": "a Hugging Face GPT-2 as a model folder, dense or recurrent",
    "bench": "measure speed, ours and a peer in turn",
    "demo": "train a small GRT within five minutes and show it",
}
