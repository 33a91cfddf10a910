"""fig:kvcache_bar: what sharing keys and values over the steps costs, on the committed grt-nano.

The numbers are those of COMMAND, whose JSON is results/nano/kvcache_bar.json; nothing is trained for it.
"""

import json
from collections.abc import Sequence
from typing import Any

from grt.config import RunConfig
from grt.errors import ConfigError
from grt.study.compare import NOT_RUN
from grt.study.report import Report, Table
from grt.study.results import Results, check_numbers

COMMAND = "grt eval models/grt-nano --windows 64 --kv full first last mean mod:2 first:all --cloze 2000 --json"
SOURCE = "kvcache_bar.json"
NUMBERS = ("loss", "loss_se", "cloze", "cloze_se")
# HellaSwag of the medium model in percent (tab:decode_mem); the figure (large model) orders mean best, last worst.
EXPECTED = {"full": 33.65, "mean": 33.90}


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    return []


def measured(results: Results) -> dict[str, dict[str, Any]]:
    """Strategy -> loss, cloze accuracy and their standard errors; empty where the command was not run."""
    path = results.folder / SOURCE
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["sharing"]
        for strategy in ("full", *found):
            check_numbers({f"{name} of {strategy}": found[strategy][name] for name in NUMBERS})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error}): write it anew with `{COMMAND}`.") from None
    return found


def build(results: Results) -> Report:
    rows = []
    found = measured(results)
    for strategy, row in found.items():
        added = row["loss"] - found["full"]["loss"]
        rows.append(
            (
                strategy, f"{row['loss']:.4f}", f"{added:+.4f}", f"{row['loss_se']:.4f}", f"{row['cloze']:.4f}",
                f"{row['cloze_se']:.4f}", f"{EXPECTED[strategy]:.2f} %" if strategy in EXPECTED else "",
            )
        )  # fmt: skip
    rows = rows or [(NOT_RUN, *[""] * 6)]
    columns = ("strategy", "loss", "more than full", "SE", "cloze accuracy", "SE", "paper, HellaSwag (medium)")
    caption = (
        "Keys and values shared over six steps, fed token by token, in models/grt-nano: nats per byte of the second "
        "half of each of 64 windows, and accuracy on 2,000 cloze items (chance .25)."
    )
    notes = [
        f"Made by `{COMMAND}`.",
        "SE is that of a row's own value, over windows and items. All rows read the same ones, so that a difference "
        "may be surer than it says; how sure was not measured.",
        "The paper's figure (large model, no values printed) has a mean of the steps best and the last step's worst. "
        "Its one pair of numbers, for medium, differs by 0.25 points; 33.65 % of HellaSwag's 10,042 items has a "
        "standard error of 0.47.",
    ]
    if found:
        notes.append(ours(found))
    figures = {"kvcache_bar": lambda axes: draw(axes, found)} if found else {}
    return Report("Sharing keys and values", [Table("kvcache_bar", caption, columns, rows)], figures, notes)


def ours(found: dict[str, dict[str, Any]]) -> str:
    """What becomes of the figure's claim."""
    order = sorted(found, key=lambda strategy: found[strategy]["loss"])
    cloze = [row["cloze"] for row in found.values()]
    error = max(row["cloze_se"] for row in found.values())
    told = "less" if max(cloze) - min(cloze) < error else "more"
    shared = [strategy for strategy in order if strategy != "full"]
    verdict = "holds" if (shared[0], shared[-1]) == ("mean", "last") else "does not hold"
    return (
        f"Ours, from the smallest loss: {', '.join(order)}. So by loss the order of the figure {verdict} here. "
        f"Accuracies differ by {max(cloze) - min(cloze):.4f} at most, {told} than one standard error ({error:.4f})."
    )


def draw(axes: Any, found: dict[str, dict[str, Any]]) -> None:
    places = range(len(found))
    values, errors = ([100 * row[key] for row in found.values()] for key in ("cloze", "cloze_se"))
    axes.errorbar(places, values, yerr=errors, fmt="o", capsize=4, color="C0")
    axes.set_xticks(places, [f"{name}\n{row['loss']:.4f} nats" for name, row in found.items()])
    axes.set_ylabel("cloze accuracy (%), one standard error")
