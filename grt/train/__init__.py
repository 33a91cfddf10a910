"""Training: the loop, its optimizer, checkpoints, monitors and logs."""
