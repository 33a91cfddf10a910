"""What `grt export` writes is the model, for processes that have no grt; and what it cannot write it says."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hub import Hub
from safetensors.torch import load_file, save_file

from grt.cli import main
from grt.data.tokenizer import get_tokenizer
from grt.methods import METHODS
from grt.model import cost
from grt.runs.checkpoint import CheckpointError, load_model

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from grt.hf import GRTForCausalLM
from grt.hf.export import write_model
from grt.hf.remote import remote_files

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "models/grt-nano"
CASES = [(method, "1+2x3+1") for method in METHODS] + [("ladder", "4L")]
TEXTS = ["Hello world", " a  b\n\n\tc 123 it's", "naïve 日本 🙂 \x00", "<|endoftext|>", "x<|endoftext|> y", ""]

# Run where grt cannot be imported: FOLDER... -> in each, seen.safetensors with all tensors, logits, and a text.
FRESH = """
import sys
sys.modules["grt"] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight, "the head is tied"
    assert model.generation_config.eos_token_id == 5
    ids = load_file(folder + "/ids.safetensors")["ids"]
    seen = {"state/" + name: x for name, x in model.state_dict().items() if name != "lm_head.weight"}
    with torch.no_grad():
        seen["logits"] = model(ids).logits
        base = AutoModel.from_pretrained(folder, trust_remote_code=True)
        seen["base"] = base(ids).last_hidden_state @ model.lm_head.weight.T
    model.generation_config.eos_token_id = None
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    seen["text"] = model.generate(ids[:, :4], num_steps=min(2, model.config.num_steps), kv="first", **options)
    if not model.config.blocks.is_dense and model.loop.rule.halts:
        seen["halted"] = model.generate(ids[:, :4], exit="state:0.5", **options)
    save_file(seen, folder + "/seen.safetensors")
"""


def in_a_fresh_process(folders: list[Path], cache: Path, python: str = sys.executable) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [python, "-c", FRESH, *map(str, folders)]
    done = subprocess.run(command, cwd=cache, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def exported(model, folder: Path, ids: torch.Tensor) -> Path:
    folder.mkdir()
    write_model(model, folder, eot=5)
    save_file({"ids": ids}, folder / "ids.safetensors")
    return folder


def check_seen(model, folder: Path, ids: torch.Tensor) -> None:
    seen, state = load_file(folder / "seen.safetensors"), model.state_dict()
    names = {name.removeprefix("state/model.recurrent.") for name in seen if name.startswith("state/")}
    assert names == state.keys()
    assert all(torch.equal(seen[f"state/model.recurrent.{name}"], x) for name, x in state.items())
    hf = GRTForCausalLM.of(model)
    with torch.no_grad():
        for logits in (seen["logits"], seen["base"], hf(ids, use_cache=False).logits):
            torch.testing.assert_close(logits, model(ids), rtol=0, atol=1e-5)
    steps = min(2, hf.config.num_steps)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_steps": steps, "kv": "first"}
    assert torch.equal(seen["text"], hf.generate(ids[:, :4], **options))
    if "halted" in seen:
        options |= {"num_steps": None, "kv": "full", "exit": "state:0.5"}
        assert torch.equal(seen["halted"], hf.generate(ids[:, :4], **options))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cases", [CASES[3:4], pytest.param(CASES, marks=pytest.mark.slow)], ids=["one", "all"])
def test_a_fresh_process_without_grt_sees_the_same_model(tiny, ids, tmp_path, cases):
    """Every tensor to the bit, gates' biases too; logits, text, the head still tied."""
    assert CASES[3][0] == "grt"
    models = [tiny(method, layout, dtype=torch.float32, gate_bias=1.5) for method, layout in cases]
    folders = [exported(model, tmp_path / f"{i}", ids) for i, model in enumerate(models)]
    in_a_fresh_process(folders, tmp_path)
    for model, folder in zip(models, folders, strict=True):
        check_seen(model, folder, ids)


@pytest.mark.parametrize(("method", "layout"), [("grt", "1+2x3+1"), ("rrt", "1+2x3+1"), ("ladder", "4L")])
def test_one_copy_of_each_tensor(tiny, ids, tmp_path, method, layout):
    model = tiny(method, layout, dtype=torch.float32)
    folder = exported(model, tmp_path / "a", ids)
    saved = load_file(folder / "model.safetensors")
    assert sum(x.nbytes for x in saved.values()) == 4 * cost.parameters(model)["total"]
    header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert (folder / "model.safetensors").stat().st_size == 4 * cost.parameters(model)["total"] + header + 8


def test_remote_code_is_flat_and_needs_torch_and_transformers_alone():
    files = remote_files()
    assert {"configuration_grt.py", "modeling_grt.py", "model_loop.py", "methods_grt.py"} <= files.keys()
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                tops = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                tops = set() if node.level else {(node.module or "").split(".")[0]}
                assert node.level <= 1 and (not node.level or f"{node.module}.py" in files), (name, node.module)
            else:
                continue
            assert tops <= sys.stdlib_module_names | {"torch", "transformers"}, name


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nano") / "out"
    assert main(["export", str(NANO), str(folder)]) == 0
    return folder


def test_the_committed_model(nano):
    model, config = load_model(NANO)
    hf = GRTForCausalLM.from_pretrained(nano)
    assert all(torch.equal(x, hf.loop.state_dict()[name]) for name, x in model.state_dict().items())
    card = (nano / "README.md").read_text(encoding="utf-8")
    for words in (
        "# grt-nano",
        "| method | grt |",
        "| parameters | 743,424 |",
        "grt train grt-nano --out",
        "| 6 | 1.2659 |",
    ):
        assert words in card
    assert GenerationConfig.from_pretrained(nano).eos_token_id == config.model.vocab_size - 1
    assert AutoConfig.from_pretrained(nano).recurrent == hf.config.recurrent
    tokenizer = AutoTokenizer.from_pretrained(nano)
    batch = tokenizer(["import", "def f("], return_tensors="pt", padding=True)
    assert batch["attention_mask"].tolist() == [[1] * 6, [1] * 6] and tokenizer.pad_token_id == 256
    said = hf.generate(**batch, max_new_tokens=12, do_sample=False, num_steps=3)
    from grt.decode.stream import generate

    want = list(generate(model, list(b"import"), max_new_tokens=12, depth=3, temperature=0))
    assert tokenizer.decode(said[0]) == "import" + bytes(want).decode()


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory):
    """A tokenizer.json whose template adds tokens around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(special_tokens=["[UNK]", "[CLS]", "[SEP]"], vocab_size=60, show_progress=False)
    tokenizer.train_from_iterator(["hello world it is 123 a b c x y"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer.save(str(path))
    return f"hf:{path}"


@pytest.mark.parametrize("name", ["bytes", "gpt2", "words"])
def test_autotokenizer_gives_grts_ids(name, word_tokenizer, tmp_path):
    from grt.hf.export import write_tokenizer

    ours = get_tokenizer(word_tokenizer if name == "words" else name)
    write_tokenizer(ours.json(), ours.eot_text, 256, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.vocab_size and theirs.eos_token_id == theirs.pad_token_id == ours.eot
    assert theirs.model_max_length == 256 and theirs.padding_side == "left"
    for text in TEXTS if name != "words" else ["hello world it is 123", "x y", ""]:
        ids = theirs(text)["input_ids"]
        assert np.array_equal(ids, ours.encode(text)), text
        assert theirs.decode(ids) == ours.decode(ids)


def test_pushing(nano, tmp_path, monkeypatch, capsys):
    assert main(["export", str(NANO), str(tmp_path / "a"), "--push", "me/nano", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "would upload to me/nano:" in told and "model.safetensors 2,978,728" in told
    with Hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        assert main(["export", str(NANO), str(tmp_path / "b"), "--push", "me/nano"]) == 0
        assert f"{hub.address}/me/nano" in capsys.readouterr().out
        assert hub.created == ["nano"] and hub.tokens == {"Bearer hf_secret"}
        written = {str(p.relative_to(tmp_path / "b")): p.read_bytes() for p in (tmp_path / "b").rglob("*")}
        assert hub.files == written and "model.safetensors" in written
        hub.refuses = True
        assert main(["export", str(NANO), str(tmp_path / "c"), "--push", "me/nano"]) == 2
    told = capsys.readouterr().err
    assert "me/nano cannot be written (" in told and "check its name, the network and `hf auth login`" in told
    assert told.count("\n") == 1 and (tmp_path / "c/model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "gguf"], "--format gguf: its runtimes have no graph that applies a core again: use hf or onnx."),
        (["--depth", "2"], "--depth is for --format onnx"),
        (["--dry-run"], "--dry-run goes with --push"),
        (["--format", "onnx", "--depth", "0"], "depth is 0: give at least 1"),
    ],
    ids=str,
)
def test_what_cannot_be_written_is_one_clear_sentence(tmp_path, capsys, arguments, message):
    assert main(["export", str(NANO), str(tmp_path / "out"), *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1 and told.out == ""


def test_a_folder_that_is_there_is_not_touched(nano, capsys):
    before = {path: path.stat().st_mtime_ns for path in nano.iterdir()}
    assert main(["export", str(NANO), str(nano)]) == 2
    assert f"{nano} is there already: give a new folder" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in nano.iterdir()}


def test_our_own_loader_refuses_a_missing_tensor(tmp_path):
    """Where transformers would begin it anew (tests/test_hf_model.py)."""
    from grt.config import config_hash
    from grt.runs.checkpoint import write_folder

    model, config = load_model(NANO)
    state = {k: v for k, v in model.state_dict().items() if k != "rule.gate.down.bias"}
    save_file(state, tmp_path / "weights")
    write_folder(tmp_path / "m", {"model.safetensors": (tmp_path / "weights").read_bytes()}, config_hash(config), 1)
    (tmp_path / "m/config.json").write_bytes((NANO / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="lacks tensor rule.gate.down.bias"):
        load_model(tmp_path / "m")


def test_without_transformers(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("grt.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["export", str(NANO), str(tmp_path / "a")]) == 2
    told = capsys.readouterr().err
    assert "grt.hf needs transformers: pip install 'gated-recurrent-transformer[hf]'" in told and told.count("\n") == 1


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_oldest_supported_transformers(tiny, ids, tmp_path):
    """In an environment of its own: remote code there, and this project's tests of the models."""
    oldest = "5.16.0"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv/bin/python")
    here = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True
    )
    others = [path for path in sys.path if path.endswith("site-packages")]
    (Path(here.stdout.strip()) / "others.pth").write_text("\n".join(others) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", f"transformers=={oldest}"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"transformers {oldest} cannot be installed here: {done.stderr.splitlines()[-1]}")
    version = [python, "-c", "import transformers; print(transformers.__version__)"]
    assert subprocess.run(version, check=True, capture_output=True, text=True).stdout.strip() == oldest
    model = tiny(dtype=torch.float32)
    folder = exported(model, tmp_path / "grt", ids)
    in_a_fresh_process([folder], tmp_path, python)
    check_seen(model, folder, ids)
    command = [python, "-m", "pytest", "-q", "-m", "not slow", "tests/test_hf_model.py", "tests/test_hf_generate.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
