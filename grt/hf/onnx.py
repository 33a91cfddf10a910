"""A model at one depth as an ONNX file: token ids in, logits out, without a cache.

The file says for how many tokens it is: in its input's shape, (batch, tokens_at_most_256), and among its metadata.
Beyond them onnxruntime refuses, though in words of its own.

Shapes: B batch, T tokens, V vocabulary.
"""

import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from grt.cache.kv import KVCache
from grt.errors import ConfigError
from grt.model.depth import Depth
from grt.model.loop import RecurrentDepthModel

CLOSE = 1e-4  # that much may logits differ, where their scale is that of a language model's
IN_ONE_FILE = 1_500_000_000  # bytes: a protobuf file ends at two gigabytes


class AtDepth(nn.Module):
    def __init__(self, model: RecurrentDepthModel, depth: Depth) -> None:
        super().__init__()
        self.model, self.depth = model, depth

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, self.depth)


def write_onnx(model: RecurrentDepthModel, path: Path, steps: int | None = None) -> float:
    """For any B and T up to the context; steps: default R. Returns the largest difference of logits in onnxruntime from
    torch's, over inputs of several shapes; raises ConfigError where the method, the machine or that difference forbids.
    """
    depth = model.full_depth if steps is None else Depth(steps)
    model.check_depth(depth.steps, least=1)
    if not KVCache(model, 1, 1).core.fixed_shapes:
        method = model.config.method
        raise ConfigError(f"{method} computes as many rows as its router chooses, and an ONNX graph cannot: export hf.")
    try:
        import onnxruntime  # type: ignore[import-not-found]
        import onnxscript  # type: ignore[import-not-found]  # noqa: F401 (torch's exporter needs it)
    except ImportError:
        raise ConfigError("--format onnx needs packages: pip install 'gated-recurrent-transformer[onnx]'.") from None
    context = model.config.context
    examples = [random_ids(model, *shape) for shape in ((2, min(8, context)), (1, 1), (3, context))]
    at_depth = AtDepth(model, depth).eval()
    with torch.no_grad():
        wanted = [at_depth(ids) for ids in examples]
    export(at_depth, examples[0], path, context)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    got = [torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0]) for ids in examples]
    difference = max((a - b).abs().max().item() for a, b in zip(got, wanted, strict=True))
    if not difference <= CLOSE:
        raise ConfigError(f"{path}: logits differ from torch's by {difference:.1e}: do not use it, export hf.")
    return difference


def random_ids(model: RecurrentDepthModel, batch: int, tokens: int) -> Tensor:
    return torch.randint(model.config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))


def export(module: AtDepth, ids: Tensor, path: Path, context: int) -> None:
    n_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    batch, tokens = torch.export.Dim("batch"), torch.export.Dim(f"tokens_at_most_{context}", max=context)
    for library in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(library).setLevel(logging.ERROR)  # what it tried and left is no news
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what these libraries themselves still use
        program = torch.onnx.export(
            module, (ids,), dynamo=True, input_names=["input_ids"], output_names=["logits"], verbose=False,
            dynamic_shapes=({0: batch, 1: tokens},),
        )  # fmt: skip
        assert program is not None
        config = module.model.config
        facts = {"context": context, "vocab_size": config.vocab_size, "depth": module.depth.steps}
        program.model.metadata_props.update({name: str(value) for name, value in facts.items()})
        program.save(path, external_data=n_bytes > IN_ONE_FILE)
