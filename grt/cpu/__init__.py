"""Kernels and the captured one-token step for CPUs: decoding works without this folder, slower."""
