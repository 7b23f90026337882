"""Keys of evaluation and text generation."""

from typing import Literal

from megatron.config.schema.base import ConfigSection, Int, Ints, Paths, PathText, Texts, field
from megatron.utils.command_line import MAX_INT


class EvaluationConfig(ConfigSection):
    """Evaluation"""

    eval_tasks: Texts | None = field(
        None, "Tasks of lm-evaluation-harness that evaluate.py runs instead of measuring extrapolation."
    )
    eval_num_fewshot: Int | None = field(None, "Few-shot examples per question. Default: the task's own number.", ge=0)
    eval_limit: float | None = field(
        None, "Maximum number of documents per task; below 1, a fraction of them. Default: all.", gt=0, le=MAX_INT
    )
    eval_include_path: Paths | None = field(None, "Folders with further task files (YAML).")
    eval_max_length: Int | None = field(
        None,
        """Maximum number of tokens per model call in tasks: longer prompts are cut at the start, longer documents are
        split into windows. Default: prompts are not cut; windows have up to 16 times the training length.""",
        ge=1,
    )
    lengths: Ints | None = field(
        None,
        "Lengths, in tokens, at which perplexity is measured. Default: the training length times 1, 2, 4, 8 and 16.",
        path="evaluation_lengths",
    )
    tokens: Int | None = field(
        None,
        "Number of tokens to score, the same ones at every length. Default: the full validation split.",
        path="eval_tokens",
        ge=1,
    )
    eval_results_prefix: PathText | None = field(
        None, "Folder of the report; same as evaluate.py --output.", placeholders=True
    )


class GenerationConfig(ConfigSection):
    """Generation"""

    text_gen_type: Literal["unconditional", "input-file", "interactive"] | None = field(
        None,
        "unconditional: no prompt; input-file: prompts from sample_input_file; interactive: prompts from the console. "
        "Default: input-file if sample_input_file is set, otherwise unconditional.",
    )
    temperature: float = field(0.0, "Sampling temperature. 0: greedy decoding.", ge=0)
    top_p: float = field(
        0.0, "Nucleus sampling: sample from the most likely tokens with this total probability. 0: off.", ge=0, le=1
    )
    top_k: Int = field(0, "Sample from this many most likely tokens. 0: from all.", ge=0)
    maximum_tokens: Int = field(64, "Maximum number of tokens to generate per sample.", ge=1, le=10**9)
    num_samples: Int = field(1, "Number of samples, in total or per prompt.", ge=1, le=10**9)
    prompt_end: str = field("\n", "Separator of prompts, in the interactive mode and in the prompt file.")
    sample_input_file: PathText | None = field(
        None, "File of prompts, separated by prompt_end; same as generate.py -i."
    )
    sample_output_file: PathText | None = field(
        None, "Output file, in JSON lines; same as generate.py -o. Default: texts are printed.", placeholders=True
    )
    recompute: bool = field(False, "True: generate without a KV cache, recomputing the full prefix for every token.")
