"""Llama-style models train like transformers' own implementations: the same weights, data and
optimizer in float32. Methods of use_positional are trained by Trainer and with LoRA.
"""

import os

import accelerate
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from kerple.transformers import load_positional, save_positional, use_positional
from megatron.convert import from_hugging_face
from megatron.inference import load_model
from tests.support.checkpoints import TRAIN_LENGTH
from tests.support.conversion import quiet
from tests.support.families import family_model
from tests.support.model_families import VOCABULARY, family_inputs, outputs
from tests.support.model_families import family_model as tiny_model
from tests.support.processes import free_ports

STEPS = 20


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama with grouped queries",
        "llama with biases",
        "mistral",
        "qwen3",
        "qwen2 with window",
    ],
)
@pytest.mark.quick(3)
def test_losses_are_those_of_transformers(family, tmp_path):
    theirs = family_model(tmp_path / "theirs", family, initializer_range=0.02).train()
    from_hugging_face(tmp_path / "theirs", tmp_path / "ours", with_tokenizer=False, report=quiet)
    ours = load_model(tmp_path / "ours")[0].train()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.005) for model in (ours, theirs)]
    losses: list[tuple[float, float]] = []
    for _ in range(STEPS):
        # A random walk can be predicted from the context.
        tokens = (torch.randint(-2, 3, (4, TRAIN_LENGTH)).cumsum(1) + 32) % 64
        pair = (ours.loss(tokens[:, :-1], tokens[:, 1:]), theirs(tokens, labels=tokens).loss)
        for loss, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append((pair[0].item(), pair[1].item()))
    assert losses[-1][0] < losses[0][0] - 0.3
    for ours_, theirs_ in losses:
        assert ours_ == pytest.approx(theirs_, abs=1e-4)


class Texts(torch.utils.data.Dataset):
    """32 random texts of 16 tokens."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, VOCABULARY, (16,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    """Without the variables of ranks that earlier tests in this process have set."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def train(model, folder, resume=None, **options):
    arguments = TrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=2,
        learning_rate=0.01,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    Trainer(model, arguments, train_dataset=Texts()).train(resume_from_checkpoint=resume)


def parameters(model):
    return [parameter.detach().clone() for parameter in model.kerple_positional.parameters()]


def test_trainer_saves_and_resumes_a_method(tmp_path):
    model = tiny_model("llama")
    use_positional(model, "kerple_log")
    before = parameters(model)
    train(model, tmp_path)
    for old, new in zip(before, parameters(model), strict=True):
        assert (new - old).abs().max() > 1e-3

    # Another process continues from step 2, and a third one loads step 4.
    resumed = tiny_model("llama")
    use_positional(resumed, "kerple_log")
    train(resumed, tmp_path / "other", resume=str(tmp_path / "checkpoint-2"))
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    load_positional(loaded, tmp_path / "checkpoint-4")
    inputs = family_inputs(model)
    assert torch.equal(outputs(loaded.eval(), inputs), outputs(model.eval(), inputs))


def test_trainer_in_bfloat16(tmp_path):
    """As in float32, up to rounding."""
    trained = []
    for bf16 in (False, True):
        model = tiny_model("llama")
        use_positional(model, "kerple_log")
        before = parameters(model)
        train(model, tmp_path / str(bf16), bf16=bf16)
        trained.append(parameters(model))
    for old, exact, rounded in zip(before, *trained, strict=True):
        assert 0 < (rounded - exact).abs().max() < 0.3 * (exact - old).abs().max()


def with_lora(method="kerple_log"):
    model = tiny_model("llama")
    use_positional(model, method)
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["kerple_positional"])
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def test_lora_with_a_method(tmp_path):
    """peft trains a copy of the method, and saves it with its adapter."""
    adapted = with_lora()
    inputs = family_inputs(adapted)
    before = outputs(adapted, inputs)
    plain = tiny_model("llama")
    use_positional(plain, "kerple_log")
    assert torch.equal(outputs(plain, inputs), before)
    start = parameters(plain)
    train(adapted, tmp_path / "run", gradient_checkpointing=True)
    trained = list(adapted.base_model.model.kerple_positional.itself.parameters())
    for old, new in zip(start, trained, strict=True):
        assert (new - old).abs().max() > 1e-3

    # Another process continues from step 2, and a third one loads step 4.
    resumed = with_lora()
    train(resumed, tmp_path / "other", resume=str(tmp_path / "run" / "checkpoint-2"))
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "run" / "checkpoint-4")
    expected = outputs(adapted.eval(), inputs)
    assert (expected - before).abs().max() > 1e-3
    for other in (resumed, loaded, loaded.merge_and_unload()):
        assert (outputs(other.eval(), inputs) - expected).abs().max() < 1e-5
    with adapted.disable_adapter():
        assert torch.equal(outputs(adapted, inputs), before)
    with pytest.raises(ValueError, match="adapter_names"):
        adapted(**inputs, adapter_names=["default", "__base__"])

    # The method alone, and an adapter for another method.
    save_positional(adapted, tmp_path / "adapter")
    other = load_positional(tiny_model("llama"), tmp_path / "adapter")
    for one, two in zip(trained, parameters(other), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(ValueError, match="kerple_power"):
        train(with_lora("kerple_power"), tmp_path, resume=str(tmp_path / "run" / "checkpoint-2"))


def train_as_rank(rank, port, folder):
    """Two steps on half of the batch, by DDP of accelerate; rank 0 saves the gradients' effect."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    accelerator = accelerate.Accelerator(cpu=True)
    model = tiny_model("llama")
    use_positional(model, "kerple_log")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    take_steps(wrapped, prepared, slice(2 * rank, 2 * rank + 2), accelerator.backward)
    if rank == 0:
        torch.save(model.state_dict(), folder / "state.pt")


def take_steps(model, optimizer, rows, backward):
    for step in range(2):
        texts = [Texts()[4 * step + index]["input_ids"] for index in range(4)]
        tokens = torch.stack(texts)[rows]
        optimizer.zero_grad()
        backward(model(tokens, labels=tokens).loss)
        optimizer.step()


@pytest.mark.ci
def test_two_processes_train_as_one(tmp_path):
    (port,) = free_ports(1)
    torch.multiprocessing.spawn(train_as_rank, (port, tmp_path), nprocs=2)
    model = tiny_model("llama")
    use_positional(model, "kerple_log")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_steps(model, optimizer, slice(None), torch.Tensor.backward)
    for name, tensor in torch.load(tmp_path / "state.pt").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=2e-6, rtol=0)


def test_layers_that_are_offloaded(tmp_path):
    """A device_map, as of device_map="auto" for a model that does not fit into memory."""
    whole = tiny_model("llama")
    whole.save_pretrained(tmp_path / "model")
    use_positional(whole, "kerple_log")
    with torch.no_grad():
        for parameter in whole.kerple_positional.parameters():
            parameter.mul_(1.5)
    save_positional(whole, tmp_path / "adapter")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    parts = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "disk")
    )
    load_positional(parts, tmp_path / "adapter")
    inputs = family_inputs(whole)
    assert torch.equal(outputs(parts.eval(), inputs), outputs(whole.eval(), inputs))


@pytest.mark.ci
def test_a_compiled_model():
    """Other lengths use the same graphs."""
    model = tiny_model("llama").eval()
    use_positional(model, "kerple_log")
    compiled = torch.compile(model, backend="eager", dynamic=True)
    graphs = []
    for length in (6, 9, 17, 31):
        tokens = torch.randint(3, VOCABULARY, (2, length))
        expected = model(tokens, use_cache=False).logits
        assert torch.equal(compiled(tokens, use_cache=False).logits, expected)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1
    # Training.
    gradients = []
    for each in (model.train(), torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        each(tokens, labels=tokens, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
