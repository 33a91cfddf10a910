"""What the tests of speculative decoding share: one prompt, and a stream that drafts after it."""

from grt.decode.sampling import Sampling
from grt.decode.speculative import Draft, SpeculativeStream

PROMPT = [3, 1, 4]
GREEDY = Sampling(0)


def speak(model, prompt=PROMPT, n=9, **options):
    fixed = {"max_new_tokens": n, "draft": Draft(1, 3), "sampling": GREEDY}
    return SpeculativeStream(model, [prompt], **fixed | options)


def tokens_of(stream) -> list[int]:
    return [drawn.token for (drawn,) in stream]
