"""Text to token shards to training windows.

Read in this order: `tokenizer` (text <-> ids), `corpus` (where text comes from), `prepare` (corpus -> prepared folder),
`shards` (the folder: written, verified, opened), `loader` (shards -> windows, by pure functions of seed and step).
Importing this package imports none of them, and so not torch either.
"""
