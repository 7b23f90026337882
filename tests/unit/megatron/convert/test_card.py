"""The model card."""

from huggingface_hub import ModelCard

from megatron.convert.card import model_card
from tests.support.conversion import make_model


def test_the_metadata_are_valid_for_the_hub():
    card = ModelCard(model_card(*make_model("alibi"), architecture=None, has_tokenizer=False))
    assert card.data.tags == ["kerple-neox", "length-extrapolation", "alibi"]
    assert (card.data.library_name, card.data.license) == ("transformers", None)
    assert "sequences of 32\ntokens with the positional method `alibi`" in card.text
