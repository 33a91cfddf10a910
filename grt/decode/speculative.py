"""Self-speculative decoding: a few steps of the core draft tokens one by one, then one pass takes all of them through
the other steps at once and says which stand. The text is distributed as without drafts; greedily, it is the same (in
bf16 up to ties).

The draft is the beginning of its own verification: a token's first k steps leave the state and the keys from which
step k + 1 goes on (RecurrentDepthModel.resume). Only the draft's read-out, with its keys in the coda, is thrown away.

Which drafts stand (arXiv 2211.17192): with q the draft's probabilities and p those at full depth, after all that
sampling does to them, a drafted x stands with probability min(1, p(x) / q(x)); the first that falls is drawn again from
max(0, p - q) over its sum, and behind drafts that all stand one more token comes from p.

Shapes: m drafted tokens, d width, V vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from grt.backbone.context import LoopContext
from grt.decode.decoder import Decoder
from grt.decode.stream import Drawn, Stream, evaluating, finite
from grt.errors import ConfigError
from grt.model.depth import Depth
from grt.model.loop import RecurrentDepthModel, last_of
from grt.schema import at_least

LONGEST = 8  # drafts before a verification, where their number is free
FIXED = 6  # and where each number would be compiled anew
REMEMBERED = 0.95  # what a verification leaves of the weight of those before it


@dataclass(frozen=True)
class Draft:
    """depth: steps of a draft (None: a quarter of the full depth). tokens: drafts before each verification (None: as
    many as pay at the acceptance seen so far)."""

    depth: int | None = None
    tokens: int | None = None


class Drafter:
    """Shallow passes over a decoder's one row, token by token, and the deep pass that completes them side by side.

    compiled_for: the number of drafts for which the deep pass is compiled, and with it the shallow one (None: neither).
    """

    def __init__(self, decoder: Decoder, depth: int | None = None, compiled_for: int | None = None) -> None:
        model, full = decoder.model, decoder.steps.steps
        if model.config.blocks.is_dense:
            raise ConfigError("a dense model has no core of which a part could draft: leave speculative out.")
        if not decoder.cache.core.fixed_shapes:
            raise ConfigError(
                f"{model.config.method} chooses in each pass who goes on, so that a draft cannot become its own "
                f"verification: leave speculative out."
            )
        if decoder.cache.core.sequential:
            raise ConfigError(
                "kv shares what only a token's last step decides, which a draft has not done: choose full, first or "
                "first:all, or leave speculative out."
            )
        if full < 2:
            raise ConfigError(f"a draft takes fewer steps than the depth of {full}: give more depth, or no drafts.")
        depth = max(1, full // 4) if depth is None else depth
        if not 1 <= depth < full:
            raise ConfigError(f"draft_depth is {depth}: give at least 1, and less than the full depth of {full}.")
        self.model, self.cache = model, decoder.cache
        self.full, self.depth = decoder.steps, Depth(depth)
        self.stopped: list[Tensor] = []  # of each token that is under way: h_k and h_pre, (2, 1, 1, d)
        self.compiled_for = compiled_for
        self._run_shallow, self._run_deep = self._shallow, self._deep
        if compiled_for is not None:
            self._run_shallow, self._run_deep = decoder.compiled(self._shallow), decoder.compiled(self._deep)

    @torch.inference_mode()
    def advance(self, token: int, read_out: bool) -> Tensor | None:
        """One more token through the first steps; with read_out, the draft's logits (V,) after it."""
        self.cache.advance()
        stopped, logits = self._run_shallow(torch.tensor([[token]], device=self.cache.device), read_out)
        self.cache.core.pause()
        self.stopped.append(stopped.clone())  # a CUDA graph writes the next one to the same place
        return None if logits is None else logits[0, -1]

    @torch.inference_mode()
    def verify(self) -> Tensor:
        """All tokens under way through the other steps: their logits (m + 1, V) at full depth."""
        self.cache.rejoin(len(self.stopped))
        run = self._run_deep if len(self.stopped) - 1 == self.compiled_for else self._deep
        logits = run(torch.cat(self.stopped, 2))
        self.stopped = []
        self.cache.commit()
        return logits[0]

    def _shallow(self, ids: Tensor, read_out: bool) -> tuple[Tensor, Tensor | None]:
        ctx = LoopContext(cache=self.cache)
        h, h_pre = self.model.enter(ids, ctx)
        h = last_of(self.model.walk(h, h_pre, ctx, self.depth))
        return torch.stack((h, h_pre)), self.model.logits(h, ctx) if read_out else None

    def _deep(self, stopped: Tensor) -> Tensor:
        ctx = LoopContext(cache=self.cache)
        h, h_pre = stopped
        h = last_of(self.model.resume(h, h_pre, ctx, self.full, self.depth.steps))
        return self.model.logits(h, ctx)


def accept(p: Tensor, q: Sequence[Tensor], drafts: Sequence[int], generator: torch.Generator) -> tuple[int, Tensor]:
    """How many of m drafts stand, and the probabilities (V,) of the token behind them; p (m + 1, V), q m times (V,)."""
    coins = torch.rand(len(drafts), generator=generator, dtype=torch.float64).tolist()
    for i, (draft, coin) in enumerate(zip(drafts, coins, strict=True)):
        if coin * q[i][draft] >= p[i][draft]:
            left = (p[i] - q[i]).clamp_min(0)
            return i, left / left.sum()
    return len(drafts), p[-1]


@dataclass(frozen=True)
class Tally:
    """What became of the drafts. `seen` counts those up to the first of each verification that fell: what comes after
    it is never asked about. So acceptance, accepted / seen, is how often a draft stands that is asked about."""

    verifications: int = 0
    drafted: int = 0
    seen: int = 0
    accepted: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.seen if self.seen else None

    @property
    def tokens_per_verification(self) -> float | None:
        return 1 + self.accepted / self.verifications if self.verifications else None


def expected_tokens(acceptance: float, drafts: float) -> float:
    """What a verification of so many drafts gives on average, 1 + a + ... + a^m, if each stands with probability a."""
    return drafts + 1 if acceptance == 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


class SpeculativeStream(Stream):
    """A Stream of one row, with drafts. draft: Draft; other options as for Stream."""

    def __init__(
        self, model: RecurrentDepthModel, prompts: Sequence[Sequence[int]], *, draft: Draft, compiled: bool = False,
        crop: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        if len(prompts) != 1:
            raise ConfigError(f"speculative decoding takes one prompt at a time, not {len(prompts)}: leave it out.")
        if crop:
            raise ConfigError("crop decodes without a cache, where a draft saves nothing: leave crop or drafts out.")
        if options.get("exit") is not None:
            raise ConfigError(
                "a draft is completed to the full depth, never to one of its own: leave exit or drafts out."
            )
        if draft.tokens is not None:
            at_least("draft_tokens", draft.tokens, 1)
        super().__init__(model, prompts, **options)
        assert isinstance(self.decoder, Decoder)
        self.fixed = draft.tokens or (FIXED if compiled else None)
        self.drafter = Drafter(self.decoder, draft.depth, self.fixed if compiled else None)
        self.tally = Tally()
        self.recent = [1.0, 1.0]  # accepted and seen, the latest counting most; to begin with, one that stood
        self.certain: deque[Drawn] = deque()  # drawn, and not given out yet

    def __next__(self) -> list[Drawn | None]:
        if not self.left or not self.live:
            raise StopIteration
        if not self.certain:
            with evaluating(self.model):
                self.certain.extend(self._verified() if self.rows else [self._first()])
        drawn = self.certain.popleft()
        self.left -= 1
        if drawn.token in self.stop_ids:
            self.drop(0)
            raise StopIteration
        self.past[0].append(drawn.token)
        return [drawn]

    def _first(self) -> Drawn:
        return Drawn(*self.sampling.pick(self._logits()[0], self.past[0], self.generators[0]), self.drafter.full.steps)

    def _verified(self) -> list[Drawn]:
        """Drafts that stand and one token more."""
        text, start, q = list(self.past[0]), len(self.past[0]), []
        for _ in range(min(self.length(), self.left - 1)):
            logits = self.drafter.advance(text[-1], read_out=True)
            assert logits is not None
            q.append(self.sampling.probabilities(finite(logits), text))
            text.append(self.sampling.draw(q[-1], self.generators[0]))
            if text[-1] in self.stop_ids:
                break
        self.drafter.advance(text[-1], read_out=False)
        logits = finite(self.drafter.verify())
        punished = [self.sampling.punished(row, text[: start + i]) for i, row in enumerate(logits)]
        p, drafts = self.sampling.narrowed(torch.stack(punished)), text[start:]
        n, behind = accept(p, q, drafts, self.generators[0])
        self.drafter.cache.rollback(len(drafts) - n)
        self._count(len(drafts), n)
        tokens = [*drafts[:n], self.sampling.draw(behind, self.generators[0])]
        logprobs = logits.double().log_softmax(-1)[range(n + 1), tokens].tolist()
        return [Drawn(*pair, self.drafter.full.steps) for pair in zip(tokens, logprobs, strict=True)]

    def _count(self, drafted: int, accepted: int) -> None:
        seen = min(accepted + 1, drafted)
        self.tally += Tally(1, drafted, seen, accepted)
        self.recent = [REMEMBERED * old + new for old, new in zip(self.recent, (accepted, seen), strict=True)]

    def length(self) -> int:
        """Drafts before the next verification: where it is free, the number that promises the most tokens for each
        block that runs, as if a block took as long for many tokens as for one."""
        if self.fixed is not None:
            return self.fixed
        layout, k = self.model.config.blocks, self.drafter.depth.steps
        one, full = layout.p + k * layout.n + layout.c, layout.p + self.drafter.full.steps * layout.n + layout.c
        acceptance = self.recent[0] / self.recent[1]
        return max(range(1, LONGEST + 1), key=lambda m: expected_tokens(acceptance, m) / (m * one + full))

    def report(self) -> dict[str, float | None]:
        """What `grt generate --json` says of the drafts."""
        return {
            "draft_depth": self.drafter.depth.steps, **asdict(self.tally), "acceptance": self.tally.acceptance,
            "tokens_per_verification": self.tally.tokens_per_verification,
        }  # fmt: skip
