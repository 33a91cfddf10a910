"""The recurrent-depth model. Start reading at loop.py."""
