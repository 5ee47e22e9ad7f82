"""The loss over the validation split, and checks that losses can be compared."""

import copy
import math

import torch
import torch.nn.functional as F

from gptling.files import UserError

EVALUATED_AT_ONCE = 4096  # tokens: 0.8 GB of GPT-2's logits
NOT_CROSS_ENTROPY = (
    "in eval mode the loss is not the cross-entropy of the logits: it cannot be compared with "
    "another model's. Put what is of the training loss alone behind `if self.training:`"
)


def copy_of(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model with the same parameters, because a forward pass may change buffers. Sets
    the random seed: the same dropout."""
    shared = {id(p): p for p in model.parameters()}
    trial = copy.deepcopy(model, shared)
    torch.manual_seed(0)
    return trial


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


@torch.no_grad()
def check_loss(model: torch.nn.Module, data, config, processes):
    """Print a warning if validation would not measure the cross-entropy of the logits, or if the
    loss is not the mean over the targets that are not -100: sequences would have other weights in
    other micro-batches. Losses with the targets of one sequence each have the loss of all targets
    as their mean."""
    batches = [data.batch(config, step, processes)[0] for step in range(4)]
    if not is_cross_entropy(copy_of(model).eval(), *batches[0]):
        print(f"warning: {NOT_CROSS_ENTROPY}")
    sequences = [inputs[0, :256] for inputs, _ in batches]
    idx = torch.stack(sequences)  # (4, T)

    def loss(targets):
        _, parts = objective_and_parts(copy_of(model)(idx, targets))
        return parts["loss"]

    one = torch.eye(4, dtype=torch.bool, device=idx.device)
    targets_of_one = [idx.where(row[:, None], -100) for row in one]
    losses = torch.stack([loss(targets) for targets in targets_of_one])
    if not torch.allclose(losses.mean(), loss(idx), rtol=5e-6):
        print("warning: the loss is not a mean over its targets: mask targets in train.py's loop")


def objective_and_parts(output: tuple) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of what GPT.forward returns with targets: what training minimises, and the parts whose
    sum it is: "loss", and what a changed model adds to it, a dict of scalars."""
    _, loss, *more = output
    added = more[0] if more else {}
    return sum(added.values(), start=loss), {"loss": loss} | added


def check_finite(value: float, step: int, config):
    """Raise UserError if a loss plus its gradient's norm is NaN or infinite."""
    if not math.isfinite(value):
        remedy = f"lower --learning_rate={config.learning_rate}, or use --dtype=float32"
        raise UserError(f"the loss or its gradient is {value} at step {step}: {remedy}")


@torch.no_grad()
def evaluate(model: torch.nn.Module, data, batch_size: int, processes, autocast) -> dict:
    """Return the loss over data's validation sequences in nats per token and in bits per byte, and
    "is_cross_entropy": False if it is none."""
    batch_size = max(1, min(batch_size, EVALUATED_AT_ONCE // data.block_size))
    sums = []  # of losses and of targets that count, on the device, which nothing waits for
    different = {}
    model.eval()
    for idx, targets in data.validation_batches(batch_size, processes):
        with autocast:
            if not sums and not is_cross_entropy(model, idx, targets):
                different = {"is_cross_entropy": False}
            _, loss, *_ = model(idx, targets)  # a mean over the targets that count: not -100
        count = (targets != -100).sum()
        sums.append(torch.stack([loss * count, count]))
    model.train()
    if hasattr(model, "reshard"):  # FSDP: or the next step would not see what is changed now
        model.reshard()
    sums = torch.stack(sums).cpu().double().sum(dim=0)
    total, count = processes.sum(sums).tolist()
    nats = total / max(1, count)  # per token
    bytes_per_token = max(1, data.val_bytes) / data.val_targets
    bits_per_byte = nats / math.log(2) / bytes_per_token
    metrics = {"val_loss": nats, "bits_per_byte": bits_per_byte, "val_tokens": data.val_targets}
    return metrics | different


def print_evaluation(
    name, data, val_loss: float, bits_per_byte: float, val_tokens: int, is_cross_entropy=True
):
    """Print the result of --eval_only: of the model `name`, its loss in nats per token."""
    losses = f"{val_loss:.4f} nats per token, perplexity {math.exp(val_loss):,.4f}"
    tokens = f"{val_tokens:,} tokens of {data.directory / 'val.npy'}"
    print(f"{losses}, {bits_per_byte:.4f} bits per byte: {name}, over {tokens}")
    if not is_cross_entropy:
        print(f"warning: {NOT_CROSS_ENTROPY}")
