"""The pipeline with a single stage against the plain sequence of layers.

Several stages are tested in training: `tests/integration/test_parallel_training.py`.
"""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from megatron.model.gpt import GPT, TransformerBlock
from megatron.model.initialization import initialize
from megatron.model.pipeline import GPTPipeline
from megatron.training.deepspeed_setup import disable_shared_memory_collectives
from tests.support.language_models import model_settings

SETTINGS = model_settings(
    num_layers=3,
    hidden_size=16,
    num_attention_heads=2,
    padded_vocab_size=32,
    max_positions=12,
    pos_emb="kerple_log",
)


@pytest.fixture
def pipeline(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    disable_shared_memory_collectives()  # DeepSpeed would compile them
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=1, num_dp=1)
    yield GPTPipeline(SETTINGS, topology=topology, partition_method="parameters")
    deepspeed.comm.destroy_process_group()


def test_one_stage_is_the_plain_model(pipeline):
    model = GPT(SETTINGS)
    for layers in (model.layers(), pipeline.layers()):
        initialize(
            layers, SETTINGS, seed=1, init_method="normal", output_init_method="normal", std=0.1
        )
    assert list(pipeline.layers()) == list(model.layers()) == [0, 2, 3, 4, 6, 7]
    assert {name for name, _ in pipeline.named_parameters()} == {
        name for name, _ in model.named_parameters()
    }
    assert isinstance(pipeline.layers()[3], TransformerBlock)
    tokens = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(0))
    labels, mask = tokens.roll(-1, 1), (tokens > 5).float()
    # The output layer is part of the loss function.
    loss = pipeline.loss_fn(pipeline(tokens), (labels, mask))
    torch.testing.assert_close(loss, model.loss(tokens, labels, mask))


def test_one_stage_shares_no_parameters_with_others(pipeline):
    assert pipeline.get_tied_weights_and_groups() == []
    assert pipeline.of_all_stages({"value": torch.ones(1)}) == {"value": torch.ones(1)}
