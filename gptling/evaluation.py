"""The loss over the validation split, and whether it can be compared with another model's."""

import math

import torch
import torch.nn.functional as F

from gptling.files import UserError

EVALUATED_AT_ONCE = 4096  # tokens: 0.8 GB of GPT-2's logits


@torch.no_grad()
def is_cross_entropy(model: torch.nn.Module, idx, targets) -> bool:
    """Whether a model's loss is the cross-entropy of its logits, by at most eight tokens of the
    first sequence. Otherwise validation losses cannot be compared with another model's."""
    idx = idx[:1, :8]
    targets = targets[:1, :8]
    loss = model(idx, targets)[1]
    logits = model(idx)[0].float()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return torch.allclose(loss.float(), expected, rtol=1e-4)


def loss_terms(output: tuple) -> dict[str, torch.Tensor]:
    """Return the terms that training minimises the sum of, by their names, given what the model
    returns: {"loss": loss}, or of a changed GPT.forward that returns (logits, loss, {"z": z})
    {"loss": loss, "z": z}."""
    _, loss, *added = output
    return {"loss": loss} | dict(*added)


def check_finite(loss_and_norm: float, step: int, config):
    """Raise UserError if the sum of a loss and its gradient's norm is NaN or infinite."""
    if not math.isfinite(loss_and_norm):
        remedy = f"lower --learning_rate={config.learning_rate}, or use --dtype=float32"
        raise UserError(f"the loss or its gradient is {loss_and_norm} at step {step}: {remedy}")


@torch.no_grad()
def evaluate(model: torch.nn.Module, data, batch_size: int, processes, autocast) -> dict:
    """Return the loss over data's validation sequences in nats per token and in bits per byte, the
    number of tokens, and is_cross_entropy of the model."""
    batch_size = max(1, min(batch_size, EVALUATED_AT_ONCE // data.block_size))
    sums = []  # of losses and of targets that count, on the device, which nothing waits for
    is_plain = True
    model.eval()
    for idx, targets in data.validation_batches(batch_size, processes):
        with autocast:
            if not sums:
                is_plain = is_cross_entropy(model, idx, targets)
            _, loss, *_ = model(idx, targets)  # a mean over the targets that count: not -100
        count = (targets != -100).sum()
        sums.append(torch.stack([loss * count, count]))
    model.train()
    if hasattr(model, "reshard"):  # FSDP keeps gathered weights, which the next step would use
        model.reshard()
    sums = torch.stack(sums).cpu().double().sum(dim=0)
    total, count = processes.sum(sums).tolist()
    nats = total / max(1, count)  # per token
    bytes_per_token = max(1, data.val_bytes) / data.val_targets
    bits_per_byte = nats / math.log(2) / bytes_per_token
    return {
        "val_loss": nats,
        "bits_per_byte": bits_per_byte,
        "val_tokens": data.val_targets,
        "is_cross_entropy": is_plain,
    }


def print_loss(name, model: torch.nn.Module, data, batch_size: int, processes, autocast):
    """--eval_only: print the loss of the model `name`, as evaluate returns it."""
    metrics = evaluate(model, data, batch_size, processes, autocast)
    nats = metrics["val_loss"]
    losses = f"{nats:.4f} nats per token, perplexity {math.exp(nats):,.4f}"
    losses += f", {metrics['bits_per_byte']:.4f} bits per byte"
    tokens = f"{metrics['val_tokens']:,} tokens of {data.directory / 'val.npy'}"
    print(f"{losses}: {name}, over {tokens}")
    if not metrics["is_cross_entropy"]:
        print("This is not the cross-entropy of the logits: see GPT.losses")
