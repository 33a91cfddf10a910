"""The engine of experiments: runs found by hash, workers, Slurm, statistics, tables, claims."""
