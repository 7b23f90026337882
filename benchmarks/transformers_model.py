"""A training step of a Llama of transformers on a CPU: its own attention, with KERPLE (log) by
`use_positional`, and with KERPLE (log) added to the mask by hand.

    python benchmarks/transformers_model.py [--threads 2] [--rounds 15] [--busy] [--json FILE]

By hand, the bias is a mask `[1, h, s, s]`, built once per step, which PyTorch's attention adds to
the scores and differentiates.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.timing import CpuBench, option_parser
from kerple.positional import KerpleLog
from kerple.transformers import use_positional
from megatron.utils.command_line import run_main

LAYERS, HIDDEN, HEADS, VOCABULARY = 4, 256, 4, 1024
TOKENS = 2048  # per step
LENGTHS = (512, 2048)


def alternatives(length: int) -> dict[str, Callable[[], object]]:
    """Name -> a forward and backward pass."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=max(LENGTHS),
    )

    # The same weights three times.
    own = AutoModelForCausalLM.from_config(config)
    added = copy.deepcopy(own)
    use_positional(added, "kerple_log")
    by_hand = copy.deepcopy(own)
    method = KerpleLog(HEADS)
    tokens = torch.randint(0, VOCABULARY, (TOKENS // length, length))

    # By hand: a mask in which later keys have a bias of minus infinity, [1, h, s, s].
    def mask() -> Tensor:
        places = torch.arange(length)
        distance = places[:, None] - places  # [s, s]
        bias = method.bias(distance.clamp(min=0))  # [h, s, s]
        return bias.masked_fill(distance < 0, float("-inf"))[None]

    def step(model: torch.nn.Module, **inputs: Tensor) -> None:
        model.zero_grad()
        outputs = model(tokens, labels=tokens, use_cache=False, **inputs)
        outputs.loss.backward()

    return {
        "own attention": lambda: step(own),
        "use_positional": lambda: step(added),
        "bias in the mask": lambda: step(by_hand, attention_mask=mask()),
    }


def main() -> int:
    bench = CpuBench(option_parser(__doc__).parse_args())
    for length in LENGTHS:
        title = f"training step of {TOKENS:,} tokens at length {length:,}"
        bench.measure(title, alternatives(length))
    return bench.finish()


if __name__ == "__main__":
    sys.exit(run_main(main))
