"""GPT-2 as Hugging Face keeps it, into grt and out again."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from grt.cli import main
from grt.cli.options import starting_config
from grt.config import Layout
from grt.decode.stream import generate
from grt.methods import build_model
from grt.model.convert import convert
from grt.runs.checkpoint import load_model

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def gpt2():
    """Random weights, at a scale where everything matters."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=32, n_embd=32, n_layer=8, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


@pytest.fixture(scope="module")
def folder(gpt2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "tiny-gpt2"
    gpt2.save_pretrained(folder)
    return folder


@pytest.fixture
def text():
    return torch.randint(257, (2, 20), generator=torch.Generator().manual_seed(3))


def run(*arguments) -> int:
    return main(["import", "gpt2", *map(str, arguments)])


def test_the_logits_survive_both_ways(gpt2, folder, text, tmp_path):
    assert run(folder, "--out", tmp_path / "ours", "--tokenizer", "bytes") == 0
    model, config = load_model(tmp_path / "ours")
    assert (config.name, config.model.layout, config.data.tokenizer) == ("tiny-gpt2", "8L", "bytes")
    with torch.no_grad():
        want = gpt2(text).logits
        assert want.std() > 0.5
        torch.testing.assert_close(model(text), want, **CLOSE)
        assert main(["export", str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        torch.testing.assert_close(again(text).logits, want, **CLOSE)
        said = gpt2.generate(text, max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None)
        options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
        again.generation_config.eos_token_id = None
        assert torch.equal(again.generate(text, **options), said)
    assert said[0, 20:].tolist() == list(generate(model, text[0].tolist(), max_new_tokens=9, temperature=0))
    card = (tmp_path / "again/README.md").read_text(encoding="utf-8")
    assert "imported from `tiny-gpt2`" in card and "Not evaluated." in card


@pytest.mark.parametrize("tying", ["stepwise", "average", "svd-lora"])
def test_a_recurrent_model_begins_from_it(gpt2, folder, tmp_path, tying):
    options = ["--to", "2+2x2+2", "--tying", tying, "--tokenizer", "bytes", "--lora-rank", "32"]
    assert run(folder, "--out", tmp_path / "tied", *options) == 0
    assert run(folder, "--out", tmp_path / "dense", "--tokenizer", "bytes") == 0
    model, config = load_model(tmp_path / "tied")
    dense, _ = load_model(tmp_path / "dense")
    assert (config.model.method, config.model.layout) == ("rrt" if tying == "svd-lora" else "grt", "2+2x2+2")
    torch.manual_seed(config.train.seed)
    want = build_model(config.model)
    how = "stepwise" if tying == "stepwise" else "average"
    convert(want, dense.state_dict(), Layout.parse("8L"), how)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in want.state_dict().items())
    notes = json.loads((tmp_path / "tied/env.json").read_text())
    assert notes["imported_from"] == "tiny-gpt2" and notes["tied"]["layers"] == (
        [[2], [5]] if tying == "stepwise" else [[2, 4], [3, 5]]
    )
    if tying == "svd-lora":  # at full rank nothing of the weights is lost; norms and biases are shared
        assert notes["tied"]["kept"] == pytest.approx(1, abs=1e-6) and config.model.lora_rank == 32


def test_in_pieces_and_under_older_names(gpt2, folder, text, tmp_path):
    """An index of several files, no `transformer.` before the names, masks and a head that are saved though tied."""
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32) for i in range(8)}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    names = sorted(tensors)
    pieces = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (tmp_path / "old").mkdir()
    for file, names in pieces.items():
        save_file({name: tensors[name] for name in names}, tmp_path / "old" / file)
    index = {"weight_map": {name: file for file, names in pieces.items() for name in names}}
    (tmp_path / "old/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "old/config.json").write_bytes((folder / "config.json").read_bytes())
    assert run(tmp_path / "old", "--out", tmp_path / "ours", "--tokenizer", "bytes") == 0
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "ours")[0](text), gpt2(text).logits, **CLOSE)


def test_its_tokenizer_comes_along(folder, tmp_path):
    from grt.data.tokenizer import get_tokenizer

    source = tmp_path / "source"
    source.mkdir()
    for file in folder.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "tokenizer.json").write_text(get_tokenizer("bytes").json(), encoding="utf-8")
    assert run(source, "--out", tmp_path / "ours") == 0
    shutil.rmtree(source)
    (tmp_path / "ours").rename(tmp_path / "moved")
    assert str(tmp_path) not in (tmp_path / "moved/config.json").read_text(encoding="utf-8")
    config = load_model(tmp_path / "moved")[1]
    assert config.data.tokenizer == f"hf:{tmp_path / 'moved/tokenizer.json'}"
    assert starting_config(["--config", str(tmp_path / "moved")])[0] == config
    assert main(["export", str(tmp_path / "moved"), str(tmp_path / "again")]) == 0
    assert str(tmp_path) not in (tmp_path / "again/README.md").read_text(encoding="utf-8")
    assert AutoTokenizer.from_pretrained(tmp_path / "again")("ab")["input_ids"] == [97, 98]
    # GPT-2's own vocabulary is known by its tokens
    shutil.copytree(folder, source)
    (source / "tokenizer.json").write_text(get_tokenizer("gpt2").json(), encoding="utf-8")
    assert run(source, "--out", tmp_path / "known") == 0
    assert load_model(tmp_path / "known")[1].data.tokenizer == "gpt2"


def edited(folder, out, config=None, weights=None):
    """The folder with some settings changed, and some tensors changed or (None) left out."""
    out.mkdir()
    settings = json.loads((folder / "config.json").read_text()) | (config or {})
    (out / "config.json").write_text(json.dumps(settings))
    tensors = load_file(folder / "model.safetensors") | (weights or {})
    save_file({name: x for name, x in tensors.items() if x is not None}, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("config", "weights", "options", "message"),
    [
        ({"model_type": "llama"}, {}, [], "is of a 'llama' model: only gpt2 can be imported"),
        ({"activation_function": "relu"}, {}, [], "has activation_function 'relu', and our blocks 'gelu_new'"),
        ({"n_inner": 64}, {}, [], "has n_inner 64, and our blocks have 128"),
        ({"scale_attn_by_inverse_layer_idx": True}, {}, [], "has scale_attn_by_inverse_layer_idx True"),
        ({"n_layer": 9}, {}, [], "lacks tensor h.8.ln_1.weight"),
        ({"n_layer": 7}, {}, [], "has tensor h.7."),
        ({}, {"transformer.wpe.weight": None}, [], "lacks tensor wpe.weight"),
        ({}, {"lm_head.weight": torch.zeros(257, 32)}, [], "has a head of its own"),
        ({}, {}, [], "its 257 tokens are not GPT-2's: name a tokenizer with --tokenizer"),
        ({}, {}, ["--to", "2+2x3+2"], "--to 2+2x3+2 executes 10 blocks and has a core, but GPT-2 has 8 layers"),
        ({}, {}, ["--to", "8L"], "--to 8L executes 8 blocks and has no core"),
        ({}, {}, ["--to", "2+2x2+2", "--method", "grd"], "model.method is 'grd': did you mean grt?"),
        ({}, {}, ["--to", "2+2x2+2", "--tying", "svd-lora", "--lora-rank", "99"], "model.lora_rank is 99"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_one_clear_sentence(folder, tmp_path, capsys, config, weights, options, message):
    source = edited(folder, tmp_path / "source", config, weights)
    tokenizer = ["--tokenizer", "bytes"] if config or weights or options else []
    assert run(source, "--out", tmp_path / "out", *tokenizer, *options) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1 and told.out == "" and not (tmp_path / "out").exists()


def test_folders_that_are_none(folder, tmp_path, capsys):
    assert run(tmp_path / "none", "--out", tmp_path / "out") == 2
    assert "none/config.json does not exist" in capsys.readouterr().err
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_bytes((folder / "config.json").read_bytes())
    assert run(tmp_path / "bare", "--out", tmp_path / "out", "--tokenizer", "bytes") == 2
    assert "model.safetensors does not exist" in capsys.readouterr().err
    (tmp_path / "bare/model.safetensors").write_bytes(b"no weights")
    assert run(tmp_path / "bare", "--out", tmp_path / "out", "--tokenizer", "bytes") == 2
    assert "bare has weights that cannot be read" in capsys.readouterr().err
    assert run(folder, "--out", tmp_path / "bare", "--tokenizer", "bytes") == 2
    assert "bare is there already: give a new folder" in capsys.readouterr().err
