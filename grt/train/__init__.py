"""Training: the loop, its optimizer, start, resume and monitors."""
