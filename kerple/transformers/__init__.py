"""Any positional method in any model of Hugging Face transformers.

    from kerple.transformers import use_positional

    model = AutoModelForCausalLM.from_pretrained("FOLDER")
    use_positional(model, "kerple_log")

The method acts in the model's self-attention through transformers' AttentionInterface; its
parameters are in `model.parameters()`. The masks of transformers become texts and windows, so no
mask `[b, 1, s, t]` is built, except for those that mean something else.
"""

import transformers

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"kerple.transformers reads the masks of transformers 5, but {transformers.__version__} is "
        "installed: pip install --upgrade transformers"
    )

from kerple.transformers.adapter import load_positional, save_positional, use_positional

__all__ = ["load_positional", "save_positional", "use_positional"]
