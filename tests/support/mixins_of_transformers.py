"""transformers' own tests of language models and of generation, for an exported model.

tests/integration/test_transformers_mixins.py copies this file to a folder that contains the tests of transformers as
`tests`, and the model's files as `exported`.
"""

import json
import unittest
from pathlib import Path

from exported import configuration_kerple, modeling_kerple
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto import modeling_auto

from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester

OPTIONS = json.loads(Path("options.json").read_text())
Config = configuration_kerple.KerpleConfig
CLASSES = {
    AutoModel: modeling_kerple.KerpleModel,
    AutoModelForCausalLM: modeling_kerple.KerpleForCausalLM,
    AutoModelForSequenceClassification: modeling_kerple.KerpleForSequenceClassification,
}

# What transformers knows of its own models. The class attribute depends on the method's options for some kernels.
AutoConfig.register("kerple", Config)
for auto, model in CLASSES.items():
    auto.register(Config, model)
modeling_auto.MODEL_MAPPING_NAMES["kerple"] = "KerpleModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["kerple"] = "KerpleForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["kerple"] = "KerpleForSequenceClassification"
modeling_kerple.KerplePreTrainedModel._supports_sdpa = OPTIONS["supports_sdpa"]


class Tester(CausalLMModelTester):
    config_class = Config
    base_model_class, causal_lm_class, sequence_classification_class = CLASSES.values()

    def __init__(self, parent, **keys):
        super().__init__(parent, **keys)
        self.positional_method = OPTIONS["method"]


class ExportedModelTest(CausalLMModelTest, unittest.TestCase):
    model_tester_class = Tester
    all_model_classes = tuple(CLASSES.values())
    pipeline_model_mapping = {  # noqa: RUF012
        "feature-extraction": modeling_kerple.KerpleModel,
        "text-generation": modeling_kerple.KerpleForCausalLM,
    }
