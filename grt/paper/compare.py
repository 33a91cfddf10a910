"""Rows beside one another: what each cost and reached over its seeds, and what becomes of a claim about two of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grt.config import RunConfig
from grt.paper.report import Table
from grt.paper.results import Result, Results
from grt.paper.statistics import below, summary

NOT_RUN = "not run"


@dataclass(frozen=True)
class Claim:
    """`a` against `b`, rows of a table. `printed`: the paper's loss of a minus that of b; None: it prints none. A
    claim is about the sign: below 0, that a is better."""

    a: str
    b: str
    printed: float | None


def costs_table(
    name: str, caption: str, rows: Mapping[str, RunConfig], results: Results, printed: Mapping[str, str] | None = None
) -> Table:
    """One row a config: sizes, costs and loss, means over the seeds that are done; `printed`: the paper's losses."""
    columns = ["model", "layout", "unique blocks", "parameters", "tokens", "training FLOPs", "FLOPs a token",
               "seconds", "seeds", "loss", "sd", *(["paper"] if printed else [])]  # fmt: skip
    body = []
    for label, config in rows.items():
        runs = list(results.by_seed(config).values())
        cells = [label, config.model.layout, str(config.model.blocks.n_unique), *_costs(runs, config)]
        body.append([*cells, *([printed.get(label, "")] if printed else [])])
    return Table(name, f"{caption} {HOW}", columns, body)


SPREAD = "± is the 95 % interval by t over seeds."
HOW = (
    f"{SPREAD} Seconds of training are as they passed on the machine of each run's env.json, whatever else it did: "
    "they measure no method's speed."
)


def _costs(runs: Sequence[Result], config: RunConfig) -> list[str]:
    tokens = f"{config.train.steps * config.train.tokens_per_step / 1e6:,.2f} M"
    if not runs:
        return ["", tokens, "", "", "", "0", NOT_RUN, ""]
    first, loss = runs[0], summary([run.loss for run in runs])
    seconds = summary([run.cost["seconds"] for run in runs]).mean
    flops = summary([run.cost["training_flops"] for run in runs]).mean
    return [
        f"{first.cost['parameters']:,}", tokens, f"{flops:.3e}", f"{first.inference_flops / 1e6:,.2f} M",
        f"{seconds:,.0f}", str(loss.n), str(loss), "" if loss.sd is None else f"{loss.sd:.4f}",
    ]  # fmt: skip


def claims_table(name: str, rows: Mapping[str, RunConfig], results: Results, claims: Sequence[Claim]) -> Table:
    """Differences paired by seed, with what becomes of each claim (verdicts: statistics.py)."""
    body = []
    for claim in claims:
        a, b = (results.losses(rows[label]) for label in (claim.a, claim.b))
        found = below(a, b)
        ours = NOT_RUN if found.difference is None else f"{found.difference.mean:+.4f}"
        half = found.difference and found.difference.half
        body.append(
            [
                f"{claim.a} - {claim.b}",
                "" if claim.printed is None else f"{claim.printed:+.3f}",
                ours,
                "" if half is None else f"{half:.4f}",
                str(found.difference.n if found.difference else 0),
                _verdict(claim, found.verdict),
            ]
        )
    columns = ("difference", "paper", "ours", "smallest that could show", "seeds", "paper's sign")
    return Table(name, f"Differences of loss in nats, paired by seed. {VERDICTS}", columns, body)


VERDICTS = (
    "A verdict needs more than its interval, which leaves it wrong by chance one time in twenty. The paper's numbers "
    "are of its own text and models, at nano scale of its small ones."
)


def _verdict(claim: Claim, below_verdict: str) -> str:
    """below_verdict is about "a below b"; where the paper prints it the other way round, so is its claim."""
    if below_verdict in ("undecided", NOT_RUN):
        return below_verdict
    if claim.printed is None or claim.printed == 0:
        return "ours: below" if below_verdict == "holds" else "ours: above"
    return "holds" if (below_verdict == "holds") == (claim.printed < 0) else "fails"
