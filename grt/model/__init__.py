"""The model: a stack of GPT-2 blocks with a recurrent core. Start reading at recurrent.py."""
