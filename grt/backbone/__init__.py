"""What a block is: attention, feed-forward, norms, the head, split linears; context.py is one pass."""
