"""Decoding: prompts in, tokens and text out."""
