"""`grt bench speculative`: what drafts gain, by their depth and their number before each verification. Plain decoding
at full depth and decoding with drafts take turns at the same prompts, pieces from all over the validation text.

Predicted is what acceptance and passes say alone: with a share a of the drafts standing, m of them give on average
1 + a + ... + a^m tokens (arXiv 2211.17192, eq. 1), for the time of m + 1 shallow passes and a deep one. Their times are
measured apart from the decoding, in its turns, and without sampling.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from grt.bench.decoding import FEW, Tick, add_ratio, empty_report, median_row, take_turns, warm_up
from grt.data.loader import Split
from grt.decode.decoder import Decoder
from grt.decode.sampling import Sampling
from grt.decode.speculative import Draft, SpeculativeStream, Tally, expected_tokens
from grt.decode.stream import Stream
from grt.device import resolve_device
from grt.errors import ConfigError
from grt.model.loop import RecurrentDepthModel
from grt.runs.checkpoint import load_model
from grt.schema import at_least
from grt.train.loop import open_data

REPEATS = 4  # of each pass that is timed, in a turn

Make = Callable[[list[int], int], Stream]  # of a prompt and a seed


class Spoken:
    """A Stream for each prompt in turn."""

    few = 3 * FEW  # the first verifications

    def __init__(self, name: str, make: Make, prompts: Sequence[list[int]], compiled: bool) -> None:
        self.name, self.make, self.prompts, self.compiled = name, make, prompts, compiled
        self.turn, self.tallies = 0, list[Tally]()

    def generate(self, new: int, tick: Tick) -> Tensor:
        stream = self.make(self.prompts[self.turn % len(self.prompts)], self.turn)
        self.turn += 1
        tokens = []
        while len(tokens) < new:
            tokens += [drawn.token for drawn in next(stream) if drawn is not None]
            if len(tokens) == 1:
                tick()
        tick()
        if isinstance(stream, SpeculativeStream):
            self.tallies.append(stream.tally)
        return torch.tensor([tokens])


class Passes:
    """A third one who takes turns, so that the machine is the same: the passes alone, over and over at one place."""

    name, few, compiled = "passes", 1, False

    def __init__(self, plain: Spoken, drafted: Spoken) -> None:
        self.plain, self.drafted = plain, drafted
        self.seconds: dict[str, list[float]] = {name: [] for name in ("plain", "draft", "last", "verify")}

    def timed(self, name: str, run: Callable[[], Tensor | None]) -> None:
        start = time.perf_counter()
        result = run()
        if result is not None:
            result.cpu()  # waits for the device
        self.seconds[name].append(time.perf_counter() - start)

    def generate(self, new: int, tick: Tick) -> Tensor:
        plain, drafted = (one.make(one.prompts[0], 0) for one in (self.plain, self.drafted))
        assert isinstance(drafted, SpeculativeStream) and isinstance(plain.decoder, Decoder)
        decoder, drafter, drafts = plain.decoder, drafted.drafter, min(drafted.length(), new - 1)
        for stream in (plain, drafted):
            next(stream)
        tick()
        token = torch.tensor([0], device=decoder.model.device)
        for _ in range(REPEATS):
            self.timed("plain", lambda: decoder.step(token))
            decoder.cache.rollback(1)
            for _ in range(drafts):
                self.timed("draft", lambda: drafter.advance(0, read_out=True))
            self.timed("last", lambda: drafter.advance(0, read_out=False))
            self.timed("verify", drafter.verify)
            drafter.cache.rollback(drafts + 1)
        tick()
        return token

    def means(self) -> dict[str, float]:
        """Not medians: on a busy machine most of the long passes are interrupted and few of the short ones are, of
        which medians would show all or nothing."""
        return {name: statistics.fmean(values) for name, values in self.seconds.items()}


def bench_speculative(
    run: Path, depths: Sequence[int] = (), lengths: Sequence[int] = (2, 4, 8), *, new: int = 128, prompts: int = 10,
    temperature: float = 0.8, compiled: bool = False, device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of the bench. depths: of drafts, default the smallest three; lengths: drafts before a
    verification, beside which (if nothing is compiled) stands a number that is left free."""
    at_least("--prompts", prompts, 1)
    at_least("--new", new, 2)
    where = resolve_device(device)
    model, config = load_model(run, where)
    R, context = config.model.blocks.R, config.model.context
    if new >= context:
        raise ConfigError(f"--new {new} leaves no room for a prompt in model.context {context}: ask for fewer.")
    sampling = Sampling(temperature)
    texts = beginnings(open_data(config, quiet=True).split("val", config.data.windows), prompts, context - new)
    report = empty_report("speculative", where, torch.float32)
    report |= {
        "run": str(run), "prompt": context - new, "new": new, "prompts": prompts, "temperature": temperature,
        "compiled": compiled,
    }  # fmt: skip
    free = [] if compiled else [None]
    drafts = [Draft(depth, length) for depth in depths or range(1, max(2, min(R, 4))) for length in [*lengths, *free]]
    for draft in drafts:
        SpeculativeStream(model, texts[:1], draft=draft, max_new_tokens=new)  # what cannot be is refused now
    for draft in drafts:
        measure(model, draft, sampling, texts, report)
        torch.compiler.reset()  # the next ones come on top of what was compiled, up to a limit
    return report


def beginnings(split: Split, count: int, tokens: int) -> list[list[int]]:
    """`count` prompts from all over the text."""
    return [split.read(split.n_tokens * i // (count + 1), tokens).tolist() for i in range(count)]


def measure(
    model: RecurrentDepthModel, draft: Draft, sampling: Sampling, prompts: Sequence[list[int]], report: dict[str, Any]
) -> None:
    """Let plain decoding and one kind of drafts take turns; add a row."""
    new, compiled = report["new"], report["compiled"]

    def plainly(prompt: list[int], seed: int) -> Stream:
        return Stream(model, [prompt], max_new_tokens=new, sampling=sampling, seeds=[seed], compiled=compiled)

    def with_drafts(prompt: list[int], seed: int) -> Stream:
        options = {"max_new_tokens": new, "sampling": sampling, "seeds": [seed], "compiled": compiled}
        return SpeculativeStream(model, [prompt], draft=draft, **options)

    name = f"depth {draft.depth}, {draft.tokens or 'free'}"
    plain, drafted = Spoken("plain", plainly, prompts, compiled), Spoken(name, with_drafts, prompts, compiled)
    timed_passes = Passes(plain, drafted)
    for contestant in (plain, drafted):
        warm_up(contestant, new)
        contestant.turn, contestant.tallies = 0, []
    times = take_turns([plain, drafted, timed_passes], new, len(prompts))
    tally = sum(drafted.tallies, Tally())
    drafts = tally.drafted / tally.verifications
    passes = timed_passes.means()
    per_cycle = drafts * passes["draft"] + passes["last"] + passes["verify"]
    assert tally.acceptance is not None
    add_ratio(report, f"ms per token, plain / {name}", times["plain"], times[name])
    measured = report["ratios"][f"ms per token, plain / {name}"]
    report["rows"].append(
        median_row(name, 1, times[name])
        | {"draft_depth": draft.depth, "draft_tokens": draft.tokens, "drafts": drafts, "acceptance": tally.acceptance}
        | {"plain_ms_per_token": median_row("plain", 1, times["plain"])["ms_per_token"]}
        | {"passes_ms": {key: 1e3 * seconds for key, seconds in passes.items()}}
        | {"predicted": passes["plain"] * expected_tokens(tally.acceptance, drafts) / per_cycle, "measured": measured}
    )


def show(report: dict[str, Any]) -> None:
    """A table for people, then the report as one JSON line."""
    console = Console(highlight=False, soft_wrap=True)
    how = f"{'compiled' if report['compiled'] else 'eager'}, temperature {report['temperature']}"
    on = f"on {report['device']} ({report['threads']} threads)"
    title = f"{report['run']}: ms per token with drafts and plain, and the gain, {how}, {on}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))  # 80 columns have to do
    for column in ("depth", "drafts", "accepted", "drafted", "plain", "predicted", "measured"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report["rows"]:
        length = str(row["draft_tokens"] or f"{row['drafts']:.1f} (free)")
        table.add_row(
            str(row["draft_depth"]), length, f"{row['acceptance']:.1%}", f"{row['ms_per_token']:.2f}",
            f"{row['plain_ms_per_token']:.2f}", f"{row['predicted']:.2f}x", f"{row['measured']:.2f}x",
        )  # fmt: skip
    console.print(table)
    print(json.dumps(report))
