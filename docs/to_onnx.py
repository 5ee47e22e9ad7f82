"""A checkpoint for ONNX Runtime: python docs/to_onnx.py out/mine mine.onnx

The graph takes idx (B, T) int64 and gives logits (B, T, V), for any B and T.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from gptling.pretrained import load_model
from model import GPT


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, idx):
        return self.model(idx)[0]


checkpoint, file = sys.argv[1:]
model = Logits(load_model(GPT, checkpoint)).eval()
idx = torch.zeros(2, 8, dtype=torch.int64)
dynamic = ({0: "batch", 1: "length"},)
names = {"input_names": ["idx"], "output_names": ["logits"]}
program = torch.onnx.export(model, (idx,), **names, dynamic_shapes=dynamic, dynamo=True)
program.save(file)
