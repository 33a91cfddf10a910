"""Accuracy on a depth task at every depth: which of the answers that its split counts are right."""

from collections import defaultdict

import torch

from grt.backbone.context import LoopContext
from grt.data.loader import windows
from grt.data.tasks import TaskSplit
from grt.device import autocast
from grt.model.depth import Depth
from grt.model.loop import RecurrentDepthModel


def accuracy_by_depth(
    model: RecurrentDepthModel, split: TaskSplit, *, depths: list[int] | None = None, limit: int | None = None,
    batch_size: int = 64, dtype: torch.dtype = torch.float32,
) -> dict[int, dict[str, float]]:  # fmt: skip
    """Depth -> group -> share of its answers that are right: every token of an answer has the largest logit, the
    tokens before it being given. depths: default 0..R; limit: read only the first windows."""
    context, device = model.config.context, model.device
    depths = list(range(model.config.blocks.R + 1)) if depths is None else depths
    counts: dict[str, int] = defaultdict(int)
    right: dict[int, dict[str, int]] = {k: defaultdict(int) for k in depths}
    model.eval()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.inference_mode():
        torch.manual_seed(0)
        for ids, targets in windows(split, context, limit, batch_size):
            spans = [list(split.spans(row.numpy())) for row in ids]
            for group, _, _ in (span for row in spans for span in row):
                counts[group] += 1
            with autocast(device, dtype):
                ctx = LoopContext()
                for k, h in enumerate(model.states(ids.to(device), ctx, Depth(max(depths)))):
                    if k not in right:
                        continue
                    hits = (model.logits(h, ctx).argmax(-1).cpu() == targets).numpy()  # (B, T)
                    for row, answers in zip(hits, spans, strict=True):
                        for group, start, stop in answers:
                            right[k][group] += bool(row[start:stop].all())
    return {k: {group: right[k][group] / counts[group] for group in sorted(counts)} for k in depths}
