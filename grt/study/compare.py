"""Rows beside one another: what each cost and reached over its seeds, and what becomes of a claim about two of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grt.config import RunConfig
from grt.study.report import Table
from grt.study.results import Result, Results
from grt.study.statistics import below, summary

NOT_RUN = "not run"


@dataclass(frozen=True)
class Claim:
    """`a` against `b`, rows of a table. `printed`: the paper's loss of a minus that of b; None: it prints none. A
    claim is about the sign: below 0, that a is better. `digits`: how many it prints."""

    a: str
    b: str
    printed: float | None
    digits: int = 3


NEAR = 0.01  # a smaller depth is as good as the full one where it costs at most this share of its loss
NO_CORE = " at depth 0"  # appended to a row's name: the same models, read out where the core was not run


def losses_of(rows: Mapping[str, RunConfig], results: Results) -> dict[str, dict[int, float]]:
    """Row -> seed -> loss at full depth; and of recurrent rows at depth 0, as `ROW at depth 0`."""
    found = {name: results.losses(config) for name, config in rows.items()}
    recurrent = {name: config for name, config in rows.items() if not config.model.blocks.is_dense}
    return found | {name + NO_CORE: results.losses(config, 0) for name, config in recurrent.items()}


def is_idle(runs: Sequence[Result]) -> bool:
    """Whether full depth is hardly better than depth 0, where the core is not run: then depth pays nothing."""
    full, none = (summary([run.by_depth[k] for run in runs]).mean for k in (max(runs[0].by_depth), 0))
    return none <= (1 + NEAR) * full


def idle_notes(rows: Mapping[str, RunConfig], results: Results) -> list[str]:
    """A sentence for each recurrent row whose loop does next to nothing: what it wins is not won by recurrence."""
    notes = []
    for name, config in rows.items():
        runs, layout = list(results.by_seed(config).values()), config.model.blocks
        if layout.is_dense or not runs or not is_idle(runs):
            continue
        full, none = (summary([run.by_depth[k] for run in runs]) for k in (layout.R, 0))
        kept = [run.gate_mean for run in runs if run.gate_mean is not None]
        gates = f", as its gates keep {summary(kept).mean:.4f} of the state at a step" if kept else ""
        blocks = layout.p + layout.c
        notes.append(
            f"The loop of {name} does next to nothing here{gates}: at depth 0, where the core is not run, its loss is "
            f"{none}, at full depth {full}. What it shows is mostly a model of {blocks} blocks, not a gain by depth."
        )
    return notes


def costs_table(
    name: str, caption: str, rows: Mapping[str, RunConfig], results: Results, printed: Mapping[str, str] | None = None
) -> Table:
    """One row a config: sizes, costs and loss, means over the seeds that are done; `printed`: the paper's losses."""
    columns = ["model", "layout", "unique blocks", "parameters", "tokens (M)", "training FLOPs", "MFLOPs a token",
               "seconds", "seeds", "loss", "sd", *(["paper"] if printed else [])]  # fmt: skip
    body = []
    for label, config in rows.items():
        runs = list(results.by_seed(config).values())
        cells = [label, config.model.layout, str(config.model.blocks.n_unique), *_costs(runs, config)]
        body.append([*cells, *([printed.get(label, "")] if printed else [])])
    return Table(name, f"{caption} {HOW}", columns, body)


SPREAD = "± is half the 95 % interval by t over seeds."
HOW = (
    f"{SPREAD} sd: over seeds. Training FLOPs are of forward and backward passes at the depths drawn, MFLOPs a token "
    "of inference at full depth, both with the head. Seconds of training are as they passed on the machine of each "
    "run's env.json, whatever else it did: they measure no method's speed."
)


def _costs(runs: Sequence[Result], config: RunConfig) -> list[str]:
    tokens = f"{config.train.steps * config.train.tokens_per_step / 1e6:,.2f}"
    if not runs:
        return ["", tokens, "", "", "", "0", NOT_RUN, ""]
    first, loss = runs[0], summary([run.loss for run in runs])
    seconds = summary([run.cost["seconds"] for run in runs]).mean
    flops = summary([run.cost["training_flops"] for run in runs]).mean
    return [
        f"{first.cost['parameters']:,}", tokens, f"{flops:.3e}", f"{first.inference_flops / 1e6:,.2f}",
        f"{seconds:,.0f}", str(loss.n), str(loss), "" if loss.sd is None else f"{loss.sd:.4f}",
    ]  # fmt: skip


def claims_table(name: str, losses: Mapping[str, Mapping[int, float]], claims: Sequence[Claim]) -> Table:
    """Differences paired by seed, with what becomes of each claim (verdicts: statistics.py). `losses`: losses_of."""
    body = []
    for claim in claims:
        found = below(losses[claim.a], losses[claim.b])
        ours = NOT_RUN if found.difference is None else f"{found.difference.mean:+.4f}"
        half = found.difference and found.difference.half
        body.append(
            [
                f"{claim.a} - {claim.b}",
                "" if claim.printed is None else f"{claim.printed:+.{claim.digits}f}",
                ours,
                "" if half is None else f"{half:.4f}",
                str(found.difference.n if found.difference else 0),
                _verdict(claim, found.verdict),
            ]
        )
    columns = ("difference", "paper", "ours", "smallest that could show", "seeds", "paper's sign")
    return Table(name, f"Differences of loss in nats, paired by seed. {VERDICTS} {PAPERS}", columns, body)


VERDICTS = (
    "A verdict is given where the difference exceeds half its 95 % interval (`smallest that could show`), else it is "
    "undecided. Where nothing differs, one in twenty would still get one: with as many rows as here, expect such."
)
PAPERS = "The paper's numbers are of its own text and models, at nano scale of its small ones."


def _verdict(claim: Claim, below_verdict: str) -> str:
    """below_verdict is about "a below b"; where the paper prints it the other way round, so is its claim."""
    if below_verdict in ("undecided", NOT_RUN):
        return below_verdict
    if claim.printed is None or claim.printed == 0:
        return "ours: below" if below_verdict == "holds" else "ours: above"
    return "holds" if (below_verdict == "holds") == (claim.printed < 0) else "fails"
