"""A dense model's weights as the start of a recurrent one that executes as many blocks, whatever its rule.

Of the L = p + nR + c layers, the first p become the prelude and the last c the coda. Core block j stands for the
layers p + rn + j (r = 0..R-1) and begins as

    average     the mean of these R layers
    stepwise    the one layer p + j (nR - 1) / (n - 1), rounded: evenly spaced from the first that is tied to the last
                (the Stepwise method of arXiv 2410.20672; a single core block takes the first). It need not be one of
                the R layers that the block stands for

every tensor of a block alike, biases and norms too. What a linear loses by that, W_(p+rn+j) - W_j, is offered to the
rule (UpdateRule.adopt). All other parameters of the rule, and of blocks of its own, start afresh.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from grt.config import Layout
from grt.model.loop import RecurrentDepthModel


def tied_layers(layout: Layout, how: str) -> list[list[int]]:
    """For each core block the dense layers whose mean it begins as."""
    p, n, R = layout.p, layout.n, layout.R
    if how == "average":
        return [[p + r * n + j for r in range(R)] for j in range(n)]
    return [[round(p + Fraction(j * (n * R - 1), max(1, n - 1)))] for j in range(n)]  # halves go to the even layer


def convert(model: RecurrentDepthModel, dense: Mapping[str, Tensor], theirs: Layout, how: str) -> dict[str, Any]:
    """Fill `model` from the state dict of a dense model of layout `theirs`; returns what was done, for env.json."""
    ours = model.config.blocks
    p, n, c, L = ours.p, ours.n, ours.c, ours.n_executions()
    from_places = [f"prelude.{i}." for i in range(theirs.p)] + [f"coda.{i}." for i in range(theirs.c)]
    layers = [{name.removeprefix(at): x for name, x in dense.items() if name.startswith(at)} for at in from_places]
    tied = tied_layers(ours, how)
    sources = [[i] for i in range(p)] + tied + [[i] for i in range(L - c, L)]
    places = [f"{part}.{i}." for part, count in (("prelude", p), ("core", n), ("coda", c)) for i in range(count)]
    state = {name: x for name, x in dense.items() if not name.startswith(("prelude.", "coda."))}
    for place, source in zip(places, sources, strict=True):
        for name, x in layers[0].items():
            # in float64, so that equal layers have themselves as their mean
            mean = torch.stack([layers[i][name] for i in source]).mean(0, dtype=torch.float64)
            state[place + name] = mean.to(x.dtype)
    model.load_state_dict(model.state_dict() | state)

    def residual(r: int, j: int, name: str) -> Tensor:
        source = layers[p + r * n + j][f"{name}.weight"]
        return (source - state[f"core.{j}.{name}.weight"]).to(model.device)  # (d_out, d_in)

    return {"how": how, "layers": tied, **model.rule.adopt(residual)}
