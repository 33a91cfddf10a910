"""The paper's tables and figures, one file each: what it prints, and what we derive or measure beside it."""
