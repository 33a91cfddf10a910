"""Keys and values of past tokens, and how the core's steps share them."""
