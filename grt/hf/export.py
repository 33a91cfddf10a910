"""A model as a folder that the Auto classes of transformers load, here or on a hub."""

import json
from pathlib import Path

from transformers import GenerationConfig
from transformers.utils import logging

from grt.hf.causal import GRTForCausalLM
from grt.hf.remote import AUTO_MAP, remote_files
from grt.model.loop import RecurrentDepthModel


def write_model(model: RecurrentDepthModel, out: Path, eot: int) -> None:
    """Weights, config.json, generation_config.json and remote code; eot: the id of end-of-text."""
    hf = GRTForCausalLM.of(model)
    hf.config.auto_map = AUTO_MAP
    hf.generation_config = GenerationConfig(eos_token_id=eot, bos_token_id=eot, pad_token_id=eot)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    hf.save_pretrained(out)
    if bars:
        logging.enable_progress_bar()
    for name, text in remote_files().items():
        (out / name).write_text(text, encoding="utf-8")


def write_tokenizer(tokenizer_json: str, eot: str, context: int, out: Path) -> None:
    """Files that AutoTokenizer loads. Text is only text there too: a spelled end-of-text is encoded as letters, and no
    token is added. Padding comes first, as generation needs it, and is end-of-text."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": eot,
        "eos_token": eot,
        "pad_token": eot,
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
