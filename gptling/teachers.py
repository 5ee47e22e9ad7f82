"""Teachers: trained models whose probabilities a new model learns, besides its text (Hinton et al.
2015, https://arxiv.org/abs/1503.02531). On a short text this helps when more steps do not."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recompute

from gptling import devices
from gptling.evaluation import ROWS_AT_ONCE, eval_mode
from gptling.files import UserError
from gptling.pretrained import find_checkpoint, load_model
from gptling.run import list_teachers


def teacher_paths(config) -> list[Path]:
    """Return the teachers: runs or checkpoints that --teacher names, or the models that a run has
    trained before this one, wherever it is now."""
    if config.teacher and config.models_before:
        return list_teachers(config.out_dir)
    return [Path(path) for path in config.teacher.split(",") if path]


def find_teachers(config) -> str:
    """Return the checkpoints that --teacher names, separated by commas. Raises UserError."""
    checkpoints = [find_checkpoint(path) for path in teacher_paths(config)]
    for checkpoint in checkpoints:
        if Path(config.out_dir).resolve() in checkpoint.resolve().parents:
            raise UserError(f"--teacher={config.teacher}: give the new run another --out_dir")
    return ",".join(checkpoint.as_posix() for checkpoint in checkpoints)


def fingerprints(config) -> bytes:
    """Return the sha256 of each teacher's weights as JSON. Raises OSError."""
    hashes = []
    for path in teacher_paths(config):
        with (path / "model.safetensors").open("rb") as weights:
            hashes.append(hashlib.file_digest(weights, "sha256").hexdigest())
    return json.dumps(hashes, indent=2).encode()


def can_teach(model) -> bool:
    """Return whether models of this class can teach each other: GPT.forward is GPT.logits of
    GPT.hidden, and the targets of GPT.losses may be probabilities. An edit may change both. Raises
    what GPT.forward raises for last_only, which each checkpoint needs."""
    T = min(16, model.config.block_size)  # a few, because their logits need memory
    idx = torch.arange(T, device=model.valid_tokens.device)[None] % model.config.vocab_size
    with eval_mode(model):
        model(idx, last_only=True)
        try:
            logits = model(idx)[0]
            model.losses(logits[0], logits[0].softmax(-1))
            return torch.allclose(logits, model.logits(model.hidden(idx)), atol=1e-4)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return False


def load_teachers(model_class: type, config, data, processes) -> list[torch.nn.Module]:
    """Return the models that --teacher names. Raises UserError for one that cannot teach."""
    teachers = []
    for path in teacher_paths(config):
        teacher = load_model(model_class, path, config.allow_changed_model)
        data.check_tokenizer(path, teacher.config.vocab_size)
        if not can_teach(teacher):
            raise UserError(
                f"--teacher={path} cannot teach: GPT.forward has to return GPT.logits of "
                "GPT.hidden, and GPT.losses has to accept probabilities as targets"
            )
        if processes.device == "cpu":
            devices.use_cpu_kernels(teacher)
        teachers.append(teacher.to(processes.device).requires_grad_(False))
    return teachers


def with_teachers(forward: Callable, model: torch.nn.Module, teachers: list, config) -> Callable:
    """Return what training calls in place of `forward`: it adds the term "teacher" to the loss, so
    that their sum is (1 - share) * loss + share * the cross-entropy with the teachers' mean
    probabilities. Without teachers that is `forward` itself."""
    share = config.teacher_share
    if share is None:
        share = len(teachers) / (len(teachers) + 1)  # the text counts as one

    def forward_with_teachers(idx, targets):
        logits, loss, *added = forward(idx, targets)
        with torch.no_grad():
            hidden = [teacher.hidden(idx) for teacher in teachers]  # (B, T, C) each
        parts = zip(*(x.flatten(0, 1).split(ROWS_AT_ONCE) for x in [logits, *hidden]), strict=True)
        losses = [recompute(soft_losses, *rows, use_reentrant=False) for rows in parts]
        counts = (targets != -100).flatten()
        mean = (torch.cat(losses) * counts).sum() / counts.sum().clamp(min=1)
        return logits, loss, dict(*added) | {"teacher": share * (mean - loss)}

    def soft_losses(logits, *hidden):
        """Return the cross-entropy of each row of logits (N, V) with the teachers' mean
        probabilities, of their hidden states (N, C). The backward pass computes it again."""
        T = config.teacher_temperature
        with torch.no_grad():
            probs = 0.0
            for teacher, x in zip(teachers, hidden, strict=True):
                own = (teacher.logits(x).float() / T).softmax(-1)
                probs = probs + F.pad(own, (0, logits.size(-1) - own.size(-1))) / len(teachers)
        # Gradients at a temperature T are smaller by 1 / T^2.
        return T**2 * model.losses(logits / T, probs)

    return forward_with_teachers if teachers else forward
