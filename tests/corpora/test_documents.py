"""Windows within documents, and prepared folders that are not what the run needs or not what they say."""

import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import build_tiny

from grt.config import RunConfig, config_hash
from grt.data.loader import batch, n_windows, windows
from grt.data.prepare import load_prepared, prepare
from grt.errors import ConfigError
from grt.evals.loss import evaluate
from grt.evals.report import find_text
from grt.presets import preset
from grt.train.loop import open_data

LENGTHS = (30, 3, 9, 8, 0, 17)  # of the documents, without end-of-text
T = 8


@pytest.fixture
def pages(tmp_path):
    """Documents of given lengths, each of a letter of its own; an empty one is no document."""
    folder = tmp_path / "pages"
    folder.mkdir()
    for i, length in enumerate(LENGTHS):
        (folder / f"{i}.txt").write_text("abcdef"[i] * length)
    return folder


def all_in_one(source, **options):
    return prepare(source, val_fraction=1.0, quiet=True, **options).split("val", "document")


def test_windows_lie_within_documents_and_reach_all_of_them(pages):
    split = all_in_one(pages)
    assert split.lengths.tolist() == [31, 4, 10, 9, 18] and split.unreachable(T) == 4
    assert split.n_starts(T) == 23 + 2 + 1 + 10 and split.n_tiles(T) == 3 + 1 + 1 + 2
    starts = [split.start(k, T) for k in range(split.n_starts(T))]
    naive, position = [], 0
    for length in split.lengths.tolist():
        naive += range(position, position + length - T)
        position += length
    assert starts == naive
    ids, _ = batch(split, seed=0, step=0, slot=0, rows=range(400), context=T)
    assert set(ids[:, 0].tolist()) == {ord(letter) for letter in "acdf"}
    assert all(len(set(row)) == 1 for row in ids.tolist())
    tiles = [row for part, _ in windows(split, T, None, 3) for row in part.tolist()]
    assert [chr(row[0]) for row in tiles] == list("aaacdff") and n_windows(split, T) == 7
    assert all(len(set(row)) == 1 for row in tiles)


def test_no_document_is_long_enough(pages):
    split = all_in_one(pages)
    split.require(31)
    with pytest.raises(
        ConfigError, match="longest document of the val split in .* has 31 tokens but a window needs 33"
    ):
        batch(split, seed=0, step=0, slot=0, rows=range(1), context=32)


def test_one_document_never_changes_the_loss_on_another(pages):
    model = build_tiny(context=T, vocab_size=257, dtype=torch.float32)
    before = evaluate(model, all_in_one(pages), depths=[3])
    starts = {chr(row[0]): n for n, (row,) in enumerate(ids.tolist() for ids, _ in windows(all_in_one(pages), T))}
    text = (pages / "0.txt").read_text()
    (pages / "0.txt").write_text("z" * len(text))
    split = all_in_one(pages)
    assert "z" not in starts and starts["a"] == 2

    def losses(split):
        return [evaluate(model, replace_tiles(split, i), depths=[3]).loss_by_depth[3] for i in range(7)]

    (pages / "0.txt").write_text(text)
    old = losses(all_in_one(pages))
    new = losses(split)
    assert new[:3] != old[:3] and new[3:] == old[3:]
    assert before.windows == 7
    # without it the letters before a document are in its windows
    plain = [row for part, _ in windows(prepare(pages, val_fraction=1.0, quiet=True).split("val"), T) for row in part]
    assert any(len({*row.tolist()} - {256}) > 1 for row in plain)


def replace_tiles(split, i):
    """The split, with its i-th window alone."""

    class One(type(split)):
        def n_tiles(self, context):
            return 1

        def tile(self, _, context):
            return super().tile(i, context)

    one = object.__new__(One)
    one.__dict__.update(vars(split))
    return one


def test_the_whole_of_two_splits(tmp_path):
    (tmp_path / "one.txt").write_text("a" * 20 + "\n" + "b" * 10)
    prepared = prepare(tmp_path / "one.txt", val_fraction=0.3, quiet=True)
    whole = prepared.whole("document")
    assert whole.n_tokens == 33 and whole.lengths.sum() == 33 and len(whole.lengths) == 2
    assert whole.starts[1] == prepared.split("train").n_tokens
    ((ids, _),) = windows(prepared.whole(), 32)
    assert bytes(ids[0, :20].tolist()) == b"a" * 20 and bytes(ids[0, -10:].tolist()) == b"b" * 10


def config_for(path, **data) -> RunConfig:
    config = preset("demo")
    return replace(config, data=replace(config.data, path=str(path), **data))


def test_the_config_says_which_windows_and_the_default_keeps_its_hash(pages):
    plain, within = config_for(pages), config_for(pages, windows="document")
    assert config_hash(plain) != config_hash(within) and plain.data.windows == "any"
    assert find_text(within, str(pages)).lengths.tolist() == [31, 4, 10, 9, 18]
    assert find_text(plain, str(pages)).n_tokens == 72


def test_eval_and_train_read_what_prepare_reads(tmp_path):
    rows = [json.dumps({"body": f"row {i} " * 9}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "b.md").write_text("# b")
    config = config_for(f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.md'}", field="body", val_fraction=0.3)
    data = open_data(config, quiet=True)
    assert sum(split["documents"] for split in data.meta["splits"].values()) == 41
    assert find_text(config, None).sha256 == data.split("val").sha256
    assert find_text(config, str(tmp_path / "b.md")).n_tokens == 4


def test_a_prepared_folder_of_other_tokens_is_refused(pages):
    gpt2 = prepare(pages, tokenizer="gpt2", quiet=True).folder
    with pytest.raises(
        ConfigError, match="holds gpt2 tokens, the run reads bytes: prepare the text with --tokenizer b"
    ):
        open_data(config_for(gpt2))
    with pytest.raises(ConfigError, match="holds gpt2 tokens, the run reads bytes"):
        find_text(config_for(pages), str(gpt2))
    config = config_for(gpt2, tokenizer="gpt2")
    with pytest.raises(ConfigError, match=r"set --model.vocab-size 50257"):
        open_data(replace(config, model=replace(config.model, vocab_size=257)))
    assert open_data(replace(config, model=replace(config.model, vocab_size=50257))).folder == gpt2


# What a folder says of itself


def test_a_folder_of_format_1_has_no_windows_within_documents(pages):
    folder = prepare(pages, quiet=True).folder
    meta = json.loads((folder / "meta.json").read_text())
    meta["format"] = 1
    for entry in meta["splits"].values():
        del entry["index"]
    (folder / "meta.json").write_text(json.dumps(meta))
    old = load_prepared(folder)
    assert old.split("val").n_tokens == meta["splits"]["val"]["tokens"]
    with pytest.raises(ConfigError, match="does not say where documents end .format 1.: prepare the data again"):
        old.split("val", "document")


def damaged_index(ends):
    return lambda folder: (folder / "val.idx").write_bytes(np.array(ends, "<u8").tobytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "val.idx").unlink(), "val.idx is missing"),
        (lambda folder: (folder / "val.idx").write_bytes(b"abc"), "val.idx has 3 bytes instead of 40"),
        (damaged_index([1, 2, 3, 4, 5]), "val.idx differs from the sha256"),
    ],
)
def test_a_damaged_index(pages, damage, message):
    folder = prepare(pages, val_fraction=1.0, quiet=True).folder
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        load_prepared(folder)


@pytest.mark.parametrize("ends", [[31, 31, 45, 54, 72], [35, 31, 45, 54, 72], [31, 35, 45, 54, 73]])
def test_an_index_out_of_order_is_refused_although_its_hash_is_right(pages, ends):
    folder = prepare(pages, val_fraction=1.0, quiet=True).folder
    damaged_index(ends)(folder)
    change_val(folder, lambda entry: entry["index"], "val.idx")
    with pytest.raises(ConfigError, match=r"val.idx has ends of documents out of order: prepare the data again"):
        load_prepared(folder)


def test_an_impossible_id_is_refused_although_its_hash_is_right(pages):
    folder = prepare(pages, val_fraction=1.0, quiet=True).folder
    ids = np.fromfile(folder / "val-00000.bin", "<u2")
    ids[40] = 257
    ids.tofile(folder / "val-00000.bin")
    change_val(folder, lambda entry: entry["shards"][0], "val-00000.bin")
    with pytest.raises(ConfigError, match=r"val-00000.bin.*257"):
        load_prepared(folder)


def change_val(folder, part, file):
    """Make meta.json say the sha256 that a file of val has now."""
    meta = json.loads((folder / "meta.json").read_text())
    part(meta["splits"]["val"])["sha256"] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))


def test_a_meta_that_lies_about_the_tokenizer(pages):
    folder = prepare(pages, quiet=True).folder
    meta = json.loads((folder / "meta.json").read_text())
    meta["tokenizer"]["vocab_size"] = 1000
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match="was written by another bytes tokenizer"):
        _ = load_prepared(folder).tokenizer


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("val-00000.bin"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths_of(values, path=()):
    yield path
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield from paths_of(value, (*path, key))


def use(folder):
    """Whatever a reader of the folder does; ConfigError is the only way to fail."""
    try:
        prepared = load_prepared(folder)
        assert prepared.tokenizer.vocab_size
        for split in (prepared.split("train"), prepared.split("val", "document"), prepared.whole()):
            split.require(T + 1)
            batch(split, seed=0, step=0, slot=0, rows=range(3), context=T)
            list(windows(split, T))
    except ConfigError as error:
        assert str(error) and "\n" not in str(error)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    (folder / "text").mkdir()
    for i in range(20):
        (folder / "text" / f"{i}.txt").write_text(f"{i} words " * (i + 3))
    return prepare(folder / "text", val_fraction=0.3, out=folder / "out", quiet=True, shard_tokens=500).folder


@pytest.fixture
def copy(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "copy")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_anywhere_in_meta_is_survived(sound, copy, data):
    meta = json.loads((sound / "meta.json").read_text())
    path = data.draw(st.sampled_from([path for path in paths_of(meta) if path]))
    inner = meta
    for key in path[:-1]:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[path[-1]] = data.draw(json_values)
    else:
        del inner[path[-1]]
    (copy / "meta.json").write_text(json.dumps(meta))
    use(copy)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_in_any_file_are_survived(sound, copy, data):
    name = data.draw(st.sampled_from(sorted(path.name for path in sound.iterdir())))
    whole = (sound / name).read_bytes()
    at, end = sorted(data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)))))
    (copy / name).write_bytes(whole[:at] + data.draw(st.binary(max_size=12)) + whole[end:])
    use(copy)
    (copy / name).write_bytes(whole)
