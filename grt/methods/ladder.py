"""The rows between plain weight tying and GRT in the paper's component ablation (tab:ablation_ladder_2k,
fig:ablation_ladder). Each adds one thing to the row above:

    row 2  recurrence         h' = B(h), every block in the core (a layout 0+nxR+0)      UpdateRule
    row 3  prelude and coda   the same rule, a layout p+nxR+c                            UpdateRule
    row 4  state noise        h' = B(h + eps_x)                                          StateNoise
    row 5  re-injection       h' = B(W_proj [h + eps_x ; h_pre])                         Reinjection (grt.py)
    row 6  gate               h' = g * h + (1 - g) * B(...)                              GRT (grt.py)

Row 1 is dense. Depth is drawn as in GRT; the paper does not say which blocks row 2 has: presets.py keeps the number
of block executions.
"""

from torch import Tensor

from grt.backbone.context import LoopContext
from grt.config import ModelConfig
from grt.methods.grt import noisy
from grt.model.rule import UpdateRule


class StateNoise(UpdateRule):
    """Row 4: fresh noise on the state that the core reads, at every step, in training only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.sigma_x = config.state_noise

    def read(self, h: Tensor, h_pre: Tensor, ctx: LoopContext) -> Tensor:
        return noisy(h, self.sigma_x, "state_noise", ctx) if self.training else h
