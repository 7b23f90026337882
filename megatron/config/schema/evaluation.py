"""What is done with a trained model: extrapolation, tasks, text."""

from typing import Literal

from megatron.config.schema.base import Group, Int, Ints, Texts, key


class EvaluationConfig(Group):
    """Evaluation"""

    eval_tasks: Texts | None = key(
        None, "Tasks of lm-evaluation-harness that evaluate.py runs, instead of measuring extrapolation."
    )
    eval_num_fewshot: Int | None = key(None, "Examples before each question of a task. Default: the task's.", ge=0)
    eval_limit: float | None = key(
        None, "Documents per task at most; below 1, the share of them. Default: all of them.", gt=0
    )
    eval_include_path: Texts | None = key(None, "Folders with task files (YAML) of your own.")
    eval_max_length: Int | None = key(
        None,
        """Tokens that tasks give to the model at once: longer prompts lose their beginning, longer documents are read
        in windows. Default: no prompt is cut; windows of up to 16 times the training length.""",
        ge=1,
    )
    lengths: Ints | None = key(
        None,
        "Lengths, in tokens, at which perplexity is measured. Default: the training length, doubled up to 16 times it.",
        path="evaluation_lengths",
    )
    tokens: Int | None = key(
        None,
        "Tokens to score; the same ones at every length. Default: the whole validation split.",
        path="eval_tokens",
        ge=1,
    )
    eval_results_prefix: str | None = key(
        None, "Folder of the report; evaluate.py's --output is the same.", placeholders=True
    )


class GenerationConfig(Group):
    """Generation"""

    text_gen_type: Literal["unconditional", "input-file", "interactive"] | None = key(
        None,
        "unconditional: from nothing; input-file: prompts of sample_input_file; interactive: prompts from the console.",
    )
    temperature: float = key(0.0, "Logits are divided by this before sampling. 0: always the likeliest token.", ge=0)
    top_p: float = key(
        0.0, "Sample from the likeliest tokens that hold this probability together. 0: from all.", ge=0, le=1
    )
    top_k: Int = key(0, "Sample from this many likeliest tokens. 0: from all.", ge=0)
    maximum_tokens: Int = key(64, "Tokens to generate per sample.", ge=1)
    num_samples: Int = key(1, "Samples to generate without prompts, or per prompt.", ge=1)
    prompt_end: str = key("\n", "What ends a prompt, in the interactive mode and in a file of prompts.")
    sample_input_file: str | None = key(
        None, "File of prompts, each ended by prompt_end; generate.py's -i is the same."
    )
    sample_output_file: str | None = key(
        "samples.txt", "File for the generated text, as JSON lines.", placeholders=True
    )
    recompute: bool = key(
        False, "True: compute the whole prefix anew for every token, without a cache of keys and values."
    )
