"""The model card."""

from huggingface_hub import ModelCard

from megatron.convert.card import model_card
from megatron.tokenizer.tokenizer import TokenizerFiles
from tests.support.conversion import make_model


def test_the_metadata_are_valid_for_the_hub():
    card = ModelCard(model_card(*make_model("alibi"), architecture=None, tokenizer=None))
    assert card.data.tags == ["kerple-neox", "length-extrapolation", "alibi"]
    assert (card.data.library_name, card.data.license) == ("transformers", None)
    assert "sequences of 32\ntokens with the positional method `alibi`" in card.text


def test_the_class_of_a_sentencepiece_model():
    tokenizer = TokenizerFiles("SPMTokenizer")
    card = model_card(*make_model("alibi"), architecture=None, tokenizer=tokenizer)
    assert 'tokenizer = LlamaTokenizerFast.from_pretrained("THIS_FOLDER")' in card


def test_what_works_depends_on_the_inference_mode():
    for mode, implementations in (
        ("full", "eager, sdpa, flex_attention"),
        ("window@8", "eager, sdpa"),
    ):
        card = model_card(*make_model("alibi"), architecture=None, tokenizer=None, mode=mode)
        assert f"`attn_implementation`: {implementations};" in card
