"""The workshop behind the scripts: what one need not read to train or hack a GPT."""
