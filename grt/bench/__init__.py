"""Benchmarks: ours and a peer in turn, a table for people, then one JSON line."""
