"""A run's folder, written and read: checkpoints, environment, metrics, comparison."""
