"""A Llama of transformers on a CPU: its own attention, with KERPLE (log) by `use_positional`, and
with KERPLE (log) added to the mask by hand. Training steps of a small model, and forward passes of
one with the sizes of Llama 3.2 1B in bfloat16 (random weights, 3 GiB).

    python benchmarks/transformers_model.py [--threads 2] [--rounds 15] [--busy] [--json FILE]

By hand, the bias is a mask `[1, h, s, s]`, built once per step, which PyTorch's attention adds to
the scores and differentiates.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.timing import CpuBench, option_parser
from kerple.positional import KerpleLog
from kerple.transformers import use_positional
from megatron.utils.command_line import run_main

TOKENS = 2048  # per step
LENGTHS = (512, 2048)  # in training
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
# Llama 3.2 1B.
LARGE = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
LARGE_ROUNDS = 3


def train(model: Any, tokens: Tensor, **inputs: Tensor) -> None:
    """A forward and a backward pass."""
    model.zero_grad()
    outputs = model(tokens, labels=tokens, use_cache=False, **inputs)
    outputs.loss.backward()


@torch.no_grad()
def infer(model: Any, tokens: Tensor, **inputs: Tensor) -> None:
    """A forward pass, with the logits of the last token."""
    model(tokens, use_cache=False, logits_to_keep=1, **inputs)


def alternatives(
    sizes: dict[str, Any], dtype: torch.dtype, length: int, run: Callable[..., None]
) -> dict[str, Callable[[], None]]:
    """Name -> a run of a model with these sizes on TOKENS tokens."""
    config = AutoConfig.for_model("llama", max_position_embeddings=TOKENS, **sizes)
    own = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tokens = torch.randint(0, sizes["vocab_size"], (TOKENS // length, length))

    # Copies with the same weights.
    shared = {id(weight): weight for weight in own.parameters()}
    added = copy.deepcopy(own, dict(shared))
    use_positional(added, "kerple_log")
    by_hand = copy.deepcopy(own, dict(shared))
    method = KerpleLog(sizes["num_attention_heads"])

    # By hand: a mask in which later keys have a bias of minus infinity, [1, h, s, s].
    def mask() -> Tensor:
        places = torch.arange(length)
        distance = places[:, None] - places  # [s, s]
        bias = method.bias(distance.clamp(min=0))  # [h, s, s]
        return bias.masked_fill(distance < 0, float("-inf")).to(dtype)[None]

    return {
        "own attention": lambda: run(own, tokens),
        "use_positional": lambda: run(added, tokens),
        "bias in the mask": lambda: run(by_hand, tokens, attention_mask=mask()),
    }


def main() -> int:
    bench = CpuBench(option_parser(__doc__).parse_args())
    for length in LENGTHS:
        title = f"training step of {TOKENS:,} tokens at length {length:,}"
        bench.measure(title, alternatives(SMALL, torch.float32, length, train))
    title = f"forward pass of {TOKENS:,} tokens, Llama 3.2 1B's sizes in bfloat16"
    large = alternatives(LARGE, torch.bfloat16, TOKENS, infer)
    bench.measure(title, large, rounds=LARGE_ROUNDS, warmup=1)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(run_main(main))
