"""The workshop behind the scripts: what one need not read to train or hack a GPT."""

import gc

gc.freeze()  # what is imported by now, PyTorch above all, is no garbage to be looked for
