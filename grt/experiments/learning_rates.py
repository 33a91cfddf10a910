"""Learning rate of every method at nano scale, and GRT's gate bias: what decides the recipe of all other nano tables.

One seed; the smallest validation loss at full depth wins, and recipes.py writes it down. The sweep began one factor
lower; every method that had its three rates was best at the largest, so its middle went there. Gate biases were
compared before that, at half of the rate that is now the middle.
"""

from collections.abc import Sequence

from grt.config import RunConfig
from grt.experiments.recipes import METHODS, NANO_FACTOR, NANO_GATE_BIAS, NANO_LR, nano, with_seeds
from grt.study.report import Report, Table
from grt.study.results import Results

FACTORS = (0.25, 0.5, 1.0, 2.0)
GATE_BIASES, BIAS_FACTOR = (4.0, 0.0, -2.0), 0.5
ROWS = ("dense", *METHODS)


def RUNS(scale: str, seeds: Sequence[int]) -> list[RunConfig]:
    """Under the first seed. Only at nano: the other scales have the paper's rate."""
    if scale != "nano":
        return []
    biases = [nano("grt", BIAS_FACTOR, bias) for bias in GATE_BIASES]
    rates = [nano(name, factor) for factor in FACTORS for name in ROWS]
    return with_seeds([*biases, *rates], seeds[:1])


def build(results: Results) -> Report:
    def loss(config: RunConfig, depth: int | None = None) -> float | None:
        return results.losses(config, depth).get(results.seeds[0])

    def cells(losses: list[float | None]) -> list[str]:
        found = [value for value in losses if value is not None]
        best = min(found) if len(found) == len(losses) else None  # of a part, nothing is the best
        return ["not run" if v is None else f"**{v:.4f}**" if v == best else f"{v:.4f}" for v in losses]

    rates = Table(
        "learning_rates",
        f"Validation loss at full depth by peak learning rate; one seed ({results.seeds[0]}).",
        ("method", *(f"{factor * NANO_LR:g}" for factor in FACTORS), "in use"),
        [
            (name, *cells([loss(nano(name, factor)) for factor in FACTORS]),
             f"{NANO_FACTOR.get(name, 1.0) * NANO_LR:g}")
            for name in ROWS
        ],
    )  # fmt: skip
    biases = Table(
        "gate_bias",
        f"GRT's loss by gate bias at learning rate {BIAS_FACTOR * NANO_LR:g}; one seed ({results.seeds[0]}).",
        ("", *(f"{bias:+g}" for bias in GATE_BIASES), "in use"),
        [
            (name, *cells([loss(nano("grt", BIAS_FACTOR, bias), depth) for bias in GATE_BIASES]), in_use)
            for name, depth, in_use in (
                ("full depth", None, f"{NANO_GATE_BIAS:+g}"),
                ("depth 1", 1, ""),
                ("depth 0", 0, ""),
            )
        ],
    )
    notes = [
        "Bold: the smallest of a row that is complete; at the row's end, a better value may lie beyond. One seed does "
        "not tell small differences from chance."
    ]
    return Report("Learning rates and gate bias at nano scale", [rates, biases], {}, notes)
