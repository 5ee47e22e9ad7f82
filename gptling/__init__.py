"""The helpers behind the scripts, which a reader who trains or hacks a GPT can skip."""
