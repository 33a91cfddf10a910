"""The model card: what the model is, how it was trained, what it scores and how to use it."""

from pathlib import Path
from typing import Any

from grt.config import RunConfig
from grt.data.corpus import split_sources

USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "."  # this folder, or its name on a hub
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(path)
inputs = tokenizer("Once", return_tensors="pt")
text = model.generate(**inputs, max_new_tokens=40, do_sample=True{depth})
print(tokenizer.decode(text[0]))
```"""


def _names(sources: str) -> str:
    """Of the text, without the folders that it was in on some machine."""
    return ", ".join(Path(part).name or part for part in split_sources(sources))


def model_card(config: RunConfig, parameters: int, environment: dict[str, Any], evaluation: dict[str, Any]) -> str:
    """environment: env.json, evaluation: metrics.jsonl's row of that kind at the step exported; each may be empty."""
    model, blocks = config.model, config.model.blocks
    depth = "" if blocks.is_dense else f", num_steps={blocks.R}"
    tokenizer = "its own" if config.data.tokenizer.startswith("hf:/") else config.data.tokenizer
    what = f"{blocks.p} transformer blocks"
    if not blocks.is_dense:
        what = f"{blocks.p} prelude blocks, a core of {blocks.n} applied {blocks.R} times, {blocks.c} coda blocks"
    rows = {
        "method": model.method_name, "layout": f"{model.layout}: {what}", "parameters": f"{parameters:,}",
        "width, heads": f"{model.d_model}, {model.n_heads}", "context": f"{model.context} tokens",
        "tokenizer": f"{tokenizer}, {model.vocab_size:,} ids", "text": f"`{_names(config.data.path)}`",
        "training": f"{config.train.steps:,} steps of {config.train.tokens_per_step:,} tokens",
        "optimizer": f"AdamW, learning rate {config.optim.lr:g}, weight decay {config.optim.weight_decay:g}",
        "seed": str(config.train.seed),
    }  # fmt: skip
    if "imported_from" in environment:  # it was not trained here
        rows = {k: v for k, v in rows.items() if k not in ("text", "training", "optimizer", "seed")}
        rows["weights"] = f"imported from `{environment['imported_from']}`"
    lines = [
        "---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- depth-recurrent", "---", "",
        f"# {config.name}", "",
        "A language model trained with `grt`, the toolkit for depth-recurrent models; its code stands beside it.", "",
        "## Use", "", USE.format(depth=depth), "",
        "A spelled end-of-text is text; no token is added around a prompt.", "",
        "## Recipe", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), "",
    ]  # fmt: skip
    if "command" in environment:
        facts = {key: environment.get(key) for key in ("commit", "cpu", "gpu", "dtype", "torch")}
        where = "; ".join(f"{key} {value}" for key, value in facts.items() if value)
        lines += ["```", environment["command"], "```", "", *([where, ""] if where else [])]
    return "\n".join([*lines, "## Results", "", *results(evaluation), ""])


def results(evaluation: dict[str, Any]) -> list[str]:
    if not evaluation:
        return ["Not evaluated."]
    by_depth = evaluation.get("loss_by_depth") or {"all": evaluation["loss"]}
    return [
        f"Validation loss at step {evaluation['step']:,}, in nats per token ({evaluation['tokens']:,} tokens):", "",
        "| depth | loss |", "|---|---|", *(f"| {depth} | {loss:.4f} |" for depth, loss in by_depth.items()),
    ]  # fmt: skip
