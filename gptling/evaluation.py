"""The loss over the validation split, and whether it can be compared with another model's."""

import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from gptling.files import UserError

EVALUATED_AT_ONCE = 4096  # tokens: 0.8 GB of GPT-2's logits
ROWS_AT_ONCE = 512  # rows of logits in float32 at a time


def summed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropies of logits (B, T, V), in nats, a few rows at a time."""
    rows = logits.flatten(0, 1).split(ROWS_AT_ONCE)
    pairs = zip(rows, targets.flatten().split(ROWS_AT_ONCE), strict=True)
    return sum(F.cross_entropy(x.float(), y, reduction="sum") for x, y in pairs)


def loss_terms(model, output: tuple, targets: torch.Tensor, later: float = 0.0) -> dict:
    """Return the terms that training minimises the sum of, by their names, given what the model
    returns for targets (B, T): {"loss": loss}, or of a changed GPT.forward that returns
    (logits, loss, {"z": z}) {"loss": loss, "z": z}. With `later` the same logits (B, T, V) predict
    the two tokens after each target, too: `later` and later / 2 are the weights of these losses."""
    logits, loss, *added = output
    terms = {"loss": loss} | dict(*added)
    if later:
        n_targets = (targets != -100).sum().clamp(min=1)
        terms["later"] = 0.0
        for ahead in (1, 2):
            losses = model.losses(logits[:, :-ahead].flatten(0, 1), targets[:, ahead:].flatten())
            terms["later"] += later / ahead * losses.sum() / n_targets
    return terms


def check_finite(loss: torch.Tensor, norm: torch.Tensor, scaler, step: int, config):
    """Raise UserError for a loss or a gradient that is NaN or infinite. float16 skips a step for
    its gradient, and halves the scale, which is an error after fifty such steps."""
    value = (loss + norm).item()
    skips = scaler.is_enabled() and scaler.get_scale() > 2**-34  # 65536 at first
    if not math.isfinite(loss if skips else value):
        raise UserError(
            f"the loss or its gradient is {value} at step {step}: "
            f"lower --learning_rate={config.learning_rate}, or use --dtype=float32"
        )


@contextmanager
def eval_mode(model: torch.nn.Module):
    """Within this context, the model is in eval mode, and nothing has a gradient."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        if hasattr(model, "reshard"):  # FSDP keeps gathered weights, which the next step would use
            model.reshard()


def evaluate(model: torch.nn.Module, data, batch_size: int, processes) -> dict:
    """Return the loss over data's validation sequences in nats per token and in bits per byte, the
    number of tokens, and is_cross_entropy: whether this loss is the cross-entropy of the logits.
    If it is not, it cannot be compared with another model's."""
    batch_size = max(1, min(batch_size, EVALUATED_AT_ONCE // data.block_size))
    sums = []  # each batch's losses and cross-entropies, on a device that no one waits for
    with eval_mode(model):
        for idx, targets in data.validation_batches(batch_size, processes):
            if processes.signal and processes.world_size == 1:  # save now: SIGKILL may follow
                raise InterruptedError("the run is stopped")
            with processes.autocast:
                logits, loss, *_ = model(idx, targets)
            n_targets = (targets != -100).sum()  # the loss is a mean over these
            summed_loss = (loss * n_targets).where(n_targets > 0, 0)  # a mean of none may be NaN
            sums.append(torch.stack([summed_loss, summed_cross_entropy(logits, targets)]))
    sums = torch.stack(sums).cpu().double().sum(dim=0)
    total, expected = processes.sum(sums).tolist()
    nats = total / data.val_targets  # per token
    bytes_per_token = max(1, data.val_bytes) / data.val_targets
    return {
        "val_loss": nats,
        "bits_per_byte": nats / math.log(2) / bytes_per_token,
        "val_tokens": data.val_targets,
        "is_cross_entropy": math.isclose(total, expected, rel_tol=1e-4),
    }


def evaluate_whole(metrics: dict, model: torch.nn.Module, data, *options) -> dict:
    """Evaluate on the whole validation split. Return what evaluate returns, with the loss and the
    tokens of an evaluation before that covered a part, as the other evaluations of the run did."""
    data.validate_on(0)
    part = {"comparable_loss": metrics["val_loss"], "comparable_tokens": metrics["val_tokens"]}
    return evaluate(model, data, *options) | part


def comparable(metrics: dict) -> tuple[float, int | None]:
    """Return the loss of an evaluation that compares with those of other steps, infinity without
    one, and the number of its tokens."""
    loss = metrics.get("comparable_loss", metrics.get("val_loss", math.inf))
    loss = loss if loss < math.inf else math.inf  # NaN compares with nothing
    return loss, metrics.get("comparable_tokens", metrics.get("val_tokens"))


def print_loss(name, model: torch.nn.Module, data, *options):
    """--eval_only: print the loss of the model `name`, as evaluate returns it."""
    metrics = evaluate(model, data, *options)
    nats = metrics["val_loss"]
    print(
        f"{nats:.4f} nats per token, perplexity {torch.tensor(nats).exp():,.4f}, "
        f"{metrics['bits_per_byte']:.4f} bits per byte: "
        f"{name}, over {metrics['val_tokens']:,} tokens of {data.directory}"
    )
    if not metrics["is_cross_entropy"]:
        print("This is not the cross-entropy of the logits: see GPT.losses")
