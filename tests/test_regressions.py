"""What was broken once: memory of truncated passes, graphs of compiled blocks, broken gates, leaks that went unsaid."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny import finish, quick, rows, write_text
from tiny import tiny as tiny_run

from grt import cli
from grt.backbone.context import LoopContext
from grt.config import ModelConfig
from grt.data.tokenizer import get_tokenizer
from grt.decode.decoder import Decoder
from grt.decode.stream import generate
from grt.errors import ConfigError
from grt.evals.cloze import _ids
from grt.methods import METHODS, build_model
from grt.model import cost
from grt.model.depth import Depth
from grt.runs.compare import Finished
from grt.train.diagnose import NonFiniteError
from grt.train.loop import Trainer
from grt.train.memory import training_peak


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    quick(monkeypatch)


def test_truncated_passes_need_no_more_memory_where_they_are_deeper(tiny, ids):
    model = tiny("poisson", "1+1x4+1", dtype=torch.float32).train()
    peaks = {k: training_peak(model, lambda k=k: model.loss(ids, ids, Depth(k, 4)).total) for k in (4, 5, 12, 24)}
    assert peaks[24] == peaks[12] and peaks[24] < 1.1 * peaks[4]


def test_the_logged_peak_is_that_of_the_deepest_draw(data, tmp_path):
    trainer = Trainer(tiny_run(data, model={"method": "poisson", "layout": "1+1x3+1"}), tmp_path / "run")
    deepest = training_peak(trainer.model, lambda: trainer.slot_loss(0, 0, depth=Depth(12, 8)).total)
    shallow = training_peak(trainer.model, lambda: trainer.slot_loss(0, 0, depth=Depth(3, 8)).total)
    trainer.close()
    assert trainer._slot_peak == deepest > 1.2 * shallow


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own look
@pytest.mark.parametrize("method", METHODS)
def test_compiled_blocks_are_a_few_graphs_however_many_steps(method):
    """Prelude, core and coda run one code: a graph for each step would pass the compiler's limit at R = 10."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    config = ModelConfig(method=method, layout="1+1x10+1", d_model=16, n_heads=2, context=12, vocab_size=23)
    model = build_model(config).train()
    for block in [*model.prelude, *model.core, *model.coda]:
        block.compile(backend="eager")
    ids = torch.randint(23, (2, 12))
    for depth in (10, 3, 7):
        model.loss(ids, ids, Depth(depth)).total.backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 4 + 2 * method.startswith("mor")  # whose steps have as many rows as capacities say


def test_a_broken_gate_stops_the_run(data, tmp_path):
    """No loss reads a gate that decides exits alone, so that only the monitors see it."""
    trainer = Trainer(tiny_run(data, model={"method": "ouro"}, train={"eval_every": 1}), tmp_path / "run")
    real = trainer.optimizer.step

    def step(*args):
        real(*args)
        with torch.no_grad():
            trainer.model.rule.gate.bias.fill_(torch.nan)

    trainer.optimizer.step = step
    with pytest.raises(NonFiniteError, match="monitored pass is not finite at step 1"):
        trainer.run()
    assert rows(tmp_path / "run", "event")[-1]["event"] == "nonfinite"


def test_a_checkpoint_with_a_broken_gate_is_no_result(data, tmp_path, capsys):
    trainer = finish(tiny_run(data, model={"method": "ouro"}, train={"steps": 1}), tmp_path / "run")
    with torch.no_grad():
        trainer.model.rule.gate.bias.fill_(torch.nan)
    trainer.checkpoints.save(trainer.model, trainer.optimizer, trainer.state)
    capsys.readouterr()
    assert cli.main(["eval", str(tmp_path / "run"), "--json"]) == 2
    assert "is not finite: its weights are broken" in capsys.readouterr().err


def test_validation_that_leaks_says_so(data, tmp_path, capsys):
    config = tiny_run(data, model={"method": "mor", "eval_routing": "topk"}, train={"steps": 1})
    finish(config, tmp_path / "leaking")
    assert rows(tmp_path / "leaking", "eval")[0]["routing"] == "topk"
    assert "warning: validation routes by topk" in capsys.readouterr().out
    finish(tiny_run(data, model={"method": "mor"}, train={"steps": 1}), tmp_path / "causal")
    assert rows(tmp_path / "causal", "eval")[0]["routing"] == "threshold"
    assert "leak" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="model.eval_routing"):
        Trainer(config, tmp_path / "causal", resume=True)


def test_capacities_do_not_route_padding(tiny, ids):
    model = tiny("mor")
    model.rule.routing = "topk"
    real = torch.ones_like(ids, dtype=torch.bool)
    real[0, 0] = False
    with pytest.raises(ConfigError, match="a padded batch cannot be routed by capacity"):
        model(ids, ctx=LoopContext(real=real))


def test_a_second_stage_costs_a_forward_pass(data, tmp_path):
    finish(tiny_run(data, model={"method": "ouro"}, train={"steps": 2}), tmp_path / "one")
    second = {"steps": 2, "stage": 2, "init_from": str(tmp_path / "one")}
    trainer = finish(tiny_run(data, model={"method": "ouro"}, train=second), tmp_path / "two")
    forward = cost.training_forward_flops(trainer.model, 3, 16) * 2 * 128
    assert Finished(tmp_path / "two").row()["training_flops"] == pytest.approx(forward)
    assert Finished(tmp_path / "one").row()["training_flops"] == pytest.approx(3 * forward)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "rrt", "lora_scale": 1e300}, "model.lora_scale is 1e.300: it must be a finite number of single"),
        ({"method": "grt", "gate_bias": -1e300}, "model.gate_bias is -1e.300: it must be a finite number of single"),
        ({"method": "poisson", "depth_sigma": 50.0}, "model.depth_sigma is 50.0: it must be at most 5"),
    ],
)
def test_numbers_that_no_model_can_hold(fields, message):
    with pytest.raises(ConfigError, match=message):
        build_model(ModelConfig(layout="1+1x3+1", d_model=16, n_heads=2, context=12, vocab_size=23, **fields))


def test_a_decoder_may_take_tokens_back_in_any_mode(tiny):
    decoder = Decoder(tiny(), [[1, 2, 3]], 6)
    decoder.prefill()
    first = decoder.step(torch.tensor([4]))
    decoder.cache.rollback(1)
    assert torch.equal(decoder.step(torch.tensor([4])), first)


def test_json_of_eval_is_json(data, tmp_path, capsys):
    finish(tiny_run(data, model={"method": "ouro"}, train={"steps": 1}), tmp_path / "run")
    capsys.readouterr()
    assert cli.main(["eval", str(tmp_path / "run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert report["extras"].keys() >= {"expected_loss", "loss at q=0.5", "depth at q=0.5"}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_broken_weights_generate_nothing(tiny, temperature):
    model = tiny()
    with torch.no_grad():
        model.ln_f.weight.fill_(torch.nan)
    with pytest.raises(ConfigError, match="the model's logits are not finite: its weights are broken"):
        list(generate(model, [1, 2], max_new_tokens=3, temperature=temperature))


def test_cloze_scores_the_bytes_that_it_names():
    text = "日本語".encode()[1:8]
    assert _ids(get_tokenizer("bytes"), text) == list(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "training", "--methods"], "--methods has no value: name at least one, or leave it out."),
        (["bench", "latency", "--batch"], "--batch has no value"),
        (["bench", "memory", "--kv"], "--kv has no value"),
        (["bench", "training", "--threads", "-1"], "--threads is -1: it must be at least 0."),
        (
            ["bench", "dial", "models/grt-nano", "--out", "/no/such/dial.png"],
            "/no/such/dial.png cannot be written",
        ),
        (["eval", "models/grt-nano", "--kv"], "--kv has no value"),
        (
            ["generate", "models/grt-nano", "--repetition-penalty", "1e-310"],
            "repetition_penalty is 1e-310: it must",
        ),
        (["generate", "models/grt-nano", "--depth", "10000000"], "depth is 10000000: give at most 384, 64 times"),
    ],
)
def test_options_that_say_nothing(capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(Path(__file__).parent.parent)
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_decoder_that_keeps_fewer_rows_restarts_with_fewer(tiny):
    model = tiny()
    decoder = Decoder(model, [[1, 2, 3], [4, 5]], 4)
    decoder.prefill()
    decoder.keep([1])
    decoder.step(torch.tensor([6]))
    decoder.restart([[7, 8]])
    want = Decoder(model, [[7, 8]], 4).prefill()
    torch.testing.assert_close(decoder.prefill(), want, rtol=0, atol=1e-11)


def test_a_prompt_may_be_read_in_pieces(tiny):
    model, prompts = tiny(), [[1, 2, 3, 4, 5], [6, 7]]
    want = Decoder(model, prompts, 4, kv="mean").prefill()
    for chunk in (1, 2, 3):
        torch.testing.assert_close(Decoder(model, prompts, 4, kv="mean").prefill(chunk), want, rtol=0, atol=1e-11)


def test_text_too_short_for_any_window_is_said_to_be(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("a line\n" * 10)
    (tmp_path / "long.txt").write_text("a line\n" * 3000)
    for name, splits in (("short", ["train", "val"]), ("long", [])):
        assert cli.main(["prepare", str(tmp_path / f"{name}.txt"), "--out", str(tmp_path / name)]) == 0
        notes = re.findall(r"^note: (\w+) has \d+ tokens, too few for a window", capsys.readouterr().err, re.M)
        assert notes == splits
