"""Make the pictures of the README and the docs again, in docs/:

    python docs/pictures.py attention
    python docs/pictures.py learning
    python docs/pictures.py minutes out/minutes_1=59 out/minutes_10=590  # with their seconds
    python docs/pictures.py explain page.html TOKEN LAYER HEAD  # a page of sample.py --explain

You need pip install -e '.[curves,browser]', and Chromium with its driver for `explain`.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

import torch
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
ORANGE = "#D55E00"  # Okabe and Ito 2008, for the colour-blind, as the second blue
BLUES = "#00395A", "#0072B2", "#56B4E9"


def attention():
    """The weights of step 1 in docs/attention.md: without a mask and with two masks."""
    words = "On warm sunny days birds sing".split()
    numbers = "43 15 89 55 87 66 57 85 64 22 58 33 77 25 10 5 80 55"
    x = torch.tensor([int(number) / 100 for number in numbers.split()]).view(6, 3)
    no_mask = torch.ones(6, 6, dtype=torch.bool)
    is_word = torch.tensor([True] * 4 + [False] * 2)
    panels = {"no mask": no_mask, "causal mask": no_mask.tril()}
    panels["padding mask: birds, sing"] = no_mask & is_word
    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
    for axes, (title, mask) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        weights = (x @ x.T).masked_fill(~mask, -torch.inf).softmax(dim=-1)
        axes.imshow(weights, cmap="Blues", vmin=0, vmax=1.3)
        axes.set(title=title, xticks=range(6), xticklabels=words, yticks=range(6))
        axes.set(yticklabels=words, xlabel="key: attended to", ylabel="query: attending")
        for i, j in mask.nonzero().tolist():
            axes.text(j, i, f"{weights[i, j]:.2f}", ha="center", va="center")
    figure.savefig(DOCS / "attention.png")


def learning():
    """The training of docs/learning.md, by its first two blocks: its losses and those of counts."""
    text = (DOCS / "learning.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    sys.path.insert(0, str(DOCS.parent))
    names = {}
    for block in blocks[:2]:
        exec(block, names)
    figure = Figure(figsize=(8, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, 401), names["losses"], color=BLUES[2], linewidth=0.7, label="each batch")
    steps, train, validation = zip(*names["curve"], strict=True)
    axes.plot(steps, train, color=BLUES[0], marker="o", label="training text")
    axes.plot(steps, validation, color=ORANGE, marker="s", label="validation text")
    counts = ["each character", "the character before", "the two characters before"]
    for n, what in enumerate(counts, 1):
        loss = names["count_loss"](n)
        axes.axhline(loss, color="gray", linestyle="dotted")
        x, side = (3, "left") if n == 3 else (398, "right")  # where no curve is
        axes.text(x, loss - 0.05, f"counts: {what}", ha=side, va="top", color="dimgray")
    axes.set(xlabel="step", ylabel="loss in nats per token", xlim=(0, 405), ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "learning.png")


def minutes(*runs: str):
    """Bits per byte against seconds: nanoGPT's own code, and one to three planned runs, each
    DIRECTORY=SECONDS. SECONDS: of the whole command, as its last lines report: "Done in 59 s"."""
    figure = Figure(figsize=(8, 4.4), dpi=160, layout="constrained")
    axes = figure.subplots()

    def draw(log: Path, name: str, whole: float = 0, **style):
        lines = log.read_text(encoding="utf-8").splitlines()
        entries = [entry for line in lines if "val_loss" in (entry := json.loads(line))]
        # A run's log begins after imports and the plan. nanoGPT's counts from the command's start.
        before = whole - entries[-1]["seconds"] if whole else 0
        trained = [entry for entry in entries if entry["step"] > 0]
        seconds = [before + entry["seconds"] for entry in trained]
        losses = [entry["bits_per_byte"] for entry in trained]
        label = f"{name}: {losses[-1]:.3f} after {seconds[-1]:.0f} s"
        axes.plot(seconds, losses, label=label, markersize=6, **style)

    log, name = DOCS / "experiments/speed/nanogpt.jsonl", "nanoGPT's own code, its CPU recipe"
    draw(log, name, color=ORANGE, linestyle="dashed", marker="s")
    for run, color, marker in zip(runs, BLUES, "o^D", strict=False):
        directory, whole = run.rsplit("=", 1)
        planned = tomllib.loads((Path(directory) / "config.toml").read_text(encoding="utf-8"))
        name = f"gptling, --minutes={planned['minutes']:g}"
        draw(Path(directory) / "log.jsonl", name, float(whole), color=color, marker=marker)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    axes.set_ylim(bottom=1.9)
    axes.set(xscale="log", xlabel="seconds since the command's start, on two CPU cores")
    axes.set(ylabel="tiny Shakespeare: validation loss, bits per byte")
    ticks = [10, 20, 30, 60, 120, 300, 600, 1200]
    axes.set_xticks(ticks, map(str, ticks), minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "minutes.png")


def explain(page: str, token: str, layer: str, head: str):
    """A page of sample.py --explain, with a token, a layer and a head chosen."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for option in ("headless=new", "no-sandbox", "window-size=1280,1130", "hide-scrollbars"):
        options.add_argument(f"--{option}")
    options.add_argument("--force-device-scale-factor=2")
    with webdriver.Chrome(options=options) as browser:
        browser.get(Path(page).absolute().as_uri())
        browser.execute_script(
            """document.querySelectorAll("#tokens .token")[arguments[0]].click();
            const choice = document.getElementById("layer");
            choice.value = arguments[1];
            choice.dispatchEvent(new Event("change"));
            document.querySelectorAll("#heads input")[arguments[2]].click();""",
            *map(int, (token, layer, head)),
        )
        browser.save_screenshot(str(DOCS / "explain.png"))


if __name__ == "__main__":
    pictures = {"attention": attention, "learning": learning, "minutes": minutes}
    (pictures | {"explain": explain})[sys.argv[1]](*sys.argv[2:])
