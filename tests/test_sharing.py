"""What sharing keys and values costs: teacher-forced losses and cloze items (fig:kvcache_bar's analogue)."""

import json
import random

import pytest
import torch

from grt import cli
from grt.backbone.context import LoopContext
from grt.cache.kv import KVCache
from grt.data.prepare import prepare
from grt.data.tokenizer import ByteTokenizer, get_tokenizer
from grt.errors import ConfigError
from grt.evals.cloze import CHOICES, CONTEXT, SPAN, Item, cloze_accuracy, dump_items, make_items
from grt.evals.loss import evaluate
from grt.evals.sharing import forced_log_probs, sharing_loss
from grt.model.depth import Depth
from grt.model.loop import last_of

STRATEGIES = ("full", "first", "last", "mean", "mod:2", "first:all")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_log_probabilities_token_by_token(tiny, ids, strategy):
    """Against one pass a token, each row alone."""
    model = tiny()
    got = forced_log_probs(model, ids[:, :5], ids[:, 5:], strategy)
    with torch.inference_mode():
        for row, want in zip(ids, got, strict=True):
            cache = KVCache(model, 1, 12, strategy=strategy, prompt=5)
            logits = []
            for piece in [row[:5], *row[5:].split(1)]:
                ctx = LoopContext(cache=cache)
                logits.append(model.logits(last_of(model.states(piece[None], ctx, Depth(3))), ctx)[0, -1])
                cache.commit()
            log_probs = torch.stack(logits[:-1]).log_softmax(-1)
            picked = torch.stack([log_probs[i, token] for i, token in enumerate(row[5:])])
            torch.testing.assert_close(want, picked.float(), rtol=0, atol=1e-6)


def test_rows_may_share_a_prompt(tiny, ids):
    model, texts = tiny(), ids.flatten()[:21].view(3, 7)
    got = forced_log_probs(model, ids[:1, :5], texts, "mean", repeat=3)
    for row, text in zip(got, texts, strict=True):
        alone = forced_log_probs(model, ids[:1, :5], text[None], "mean")[0]
        torch.testing.assert_close(row, alone, rtol=0, atol=1e-6)


def test_full_is_the_ordinary_loss_of_the_second_half(tiny, split_of):
    model, split = tiny(dtype=torch.float32), split_of([(7 * i * i + i) % 23 for i in range(100)])
    loss, error = sharing_loss(model, split, "full", batch_size=3)
    windows = [torch.tensor(split.read(12 * i, 13).astype(int)) for i in range(8)]
    losses = []
    for window in windows:
        logits = model(window[None, :-1])[0].log_softmax(-1)
        losses.append(torch.stack([-logits[t, window[t + 1]] for t in range(5, 12)]).mean())
    want = torch.stack(losses)
    assert loss == pytest.approx(want.mean().item(), rel=1e-5)
    assert error == pytest.approx((want.std() / 8**0.5).item(), rel=1e-4)
    assert sharing_loss(model, split, "mean", limit=2)[0] != pytest.approx(loss, rel=1e-5)
    assert sharing_loss(model, split, "full", limit=2)[0] == pytest.approx(want[:2].mean().item(), rel=1e-5)
    whole = evaluate(model, split).loss_by_depth[3]
    assert whole != pytest.approx(loss, rel=1e-5), "the first half is not scored"


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A prepared folder whose documents each have an alphabet of their own."""
    folder, rng = tmp_path_factory.mktemp("docs"), random.Random(0)
    for i in range(60):
        letters = [chr(97 + (i + k) % 26) for k in range(3)]
        (folder / f"{i}.txt").write_text("".join(rng.choices(letters, k=200 + 40 * i)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield prepare(folder, out=folder / "prepared", val_fraction=0.3)


def test_items_are_what_they_say(documents):
    split, tokenizer = documents.split("val", "document"), get_tokenizer("bytes")
    items = make_items(split, tokenizer, 200, seed=3)
    texts = [
        tokenizer.decode(split.read(s, n - 1).tolist()).encode()
        for s, n in zip(split.starts.tolist(), split.lengths.tolist(), strict=True)
    ]
    for item in items:
        assert len(item.context) == CONTEXT and [len(c) for c in item.choices] == CHOICES * [SPAN]
        assert any(item.context + item.choices[item.answer] in text for text in texts)
        [home] = [text for text in texts if item.context in text]
        for i, choice in enumerate(item.choices):
            assert any(choice in text for text in texts)
            assert (choice in home) == (i == item.answer)
    assert {item.answer for item in items} == set(range(CHOICES))
    assert make_items(split, tokenizer, 200, seed=3) == items != make_items(split, tokenizer, 200, seed=4)


def test_items_are_kept_as_json_lines(documents, tmp_path):
    items = make_items(documents.split("val", "document"), get_tokenizer("bytes"), 5)
    digest = dump_items(items, tmp_path / "items.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text("utf-8").splitlines()]
    again = [
        Item(row["context"].encode("latin-1"), tuple(c.encode("latin-1") for c in row["choices"]), row["answer"])
        for row in rows
    ]
    assert again == items and dump_items(again) == digest != dump_items(items[:4])


def test_too_few_documents(split_of, tmp_path):
    (tmp_path / "a.txt").write_text("abc " * 500, encoding="utf-8")
    split = prepare(tmp_path / "a.txt", out=tmp_path / "prepared").split("val", "document")
    with pytest.raises(ConfigError, match="cloze needs 4"):
        make_items(split, get_tokenizer("bytes"), 10)


def test_accuracy_is_of_the_highest_mean(tiny, monkeypatch):
    """The model's part is replaced by one that knows the answer, or its opposite."""
    items = [Item(bytes([65 + i]) * CONTEXT, tuple(bytes([97 + c]) * SPAN for c in range(4)), i % 4) for i in range(10)]
    model = tiny(context=256, vocab_size=257)

    def likes(letter_of):
        def scores(model, prompt, text, strategy, repeat, steps):
            assert strategy == "mean" and len(prompt) * repeat == len(text)
            wanted = torch.tensor([letter_of(int(p[0]) - 65) for p in prompt for _ in range(repeat)])
            return (text[:, :1] == wanted[:, None]).float().expand(-1, text.shape[1])

        return scores

    for letter_of, accuracy in ((lambda i: 97 + i % 4, 1.0), (lambda i: 97 + (i + 1) % 4, 0.0)):
        monkeypatch.setattr("grt.evals.cloze.forced_log_probs", likes(letter_of))
        got = cloze_accuracy(model, items, get_tokenizer("bytes"), "mean", batch_size=3)
        assert got == (accuracy, 0.0)


def test_texts_of_several_lengths(tiny):
    """A tokenizer may make more or fewer tokens of as many bytes: each item is scored as if it were alone."""
    tokenizer = get_tokenizer("bytes")
    items = [Item(("é" * 20 + "a" * k).encode(), (b"abc", "éd".encode(), b"xy", b"q"), 1) for k in (0, 1, 0)]
    model = tiny(context=64, vocab_size=257, dtype=torch.float32)
    together, _ = cloze_accuracy(model, items, tokenizer)
    alone = [cloze_accuracy(model, [item], tokenizer)[0] for item in items]
    assert together == pytest.approx(sum(alone) / 3)


class Voiced(ByteTokenizer):
    """Has no ids for what some tokenizers take for nothing: a space, say."""

    name = "voiced"

    def encode(self, text):
        return super().encode(text.replace(" ", ""))


def test_a_choice_without_a_token_is_no_answer(tiny):
    """Nor is it the mean of no numbers, which is above all others."""
    model = tiny(context=64, vocab_size=257, dtype=torch.float32)
    items = [Item(b"abc", (b"d", b"e", b"f", b"g"), 1), Item(b"abc", (b"d", b"  ", b"f", b"g"), 1)]
    with pytest.raises(ConfigError, match="cloze has item 1 with the choice b'  ', for which voiced has no token"):
        cloze_accuracy(model, items, Voiced(), batch_size=1)
    spaces, fresh = Item(b"  ", (b"d", b"e", b"f", b"g"), 0), []
    for answer in range(4):
        fresh.append(cloze_accuracy(model, [spaces._replace(answer=answer)], Voiced())[0])
    ids = torch.tensor([[256]])
    with torch.inference_mode():
        likeliest = int(model(ids)[0, -1, list(b"defg")].argmax())
    assert [answer for answer, right in enumerate(fresh) if right] == [likeliest]  # after end-of-text


def test_the_command(documents, tmp_path, capsys):
    out, options = tmp_path / "run", ["--model.d-model", "16", "--model.n-heads", "2", "--model.context", "192"]
    train = ["--train.steps", "1", "--train.batch-size", "2", "--train.tokens-per-step", "384", "--train.dtype", "fp32"]
    source = ["--data.path", str(documents.folder), "--train.threads", "1", "--out", str(out)]
    assert cli.main(["train", "grt-nano", *options, *train, *source]) == 0
    capsys.readouterr()
    assert cli.main(["eval", str(out), "--windows", "4", "--kv", "full", "mean", "--cloze", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["sharing"]) == ["full", "mean"] and report["kv"] == "full"
    for row in report["sharing"].values():
        assert (
            row.keys() == {"depth", "loss", "loss_se", "cloze", "cloze_se", "cloze_sha256"} and 0 <= row["cloze"] <= 1
        )
    assert cli.main(["eval", str(out), "--windows", "4", "--kv", "first"]) == 0
    assert "token by token" in capsys.readouterr().out
    for wrong, told in (
        (["--kv", "fist"], "kv is 'fist': choose one of full"),
        (["--cloze", "5"], "cloze is 5: give a number of items, and --kv"),
        (["--kv", "full", "--cloze", "-1"], "cloze is -1"),
    ):
        assert cli.main(["eval", str(out), *wrong]) == 2
        assert told in capsys.readouterr().err
