"""The model card."""

from huggingface_hub import ModelCard

from megatron.convert.card import CardDetails, model_card
from tests.support.conversion import make_model


def test_a_card_without_details_is_valid():
    card = ModelCard(model_card(*make_model("alibi"), CardDetails(), architecture=None, has_tokenizer=False))
    assert card.data.tags == ["kerple-neox", "length-extrapolation", "alibi"]
    assert card.data.license is card.data.language is None
    assert "trained on `" not in card.text


def test_perplexities_by_length():
    values = {(("a|b", "last-k@256", "full"), 512): 20.125, (("a|b", "last-k@256", "window@64"), 1024): 1234.5}
    text = model_card(*make_model("alibi"), CardDetails(perplexities=values), architecture=None, has_tokenizer=False)
    assert r"| a\|b | last-k@256 | full | 20.12 | n/a |" in text
    assert r"| a\|b | last-k@256 | window@64 | n/a | 1,234.50 |" in text
