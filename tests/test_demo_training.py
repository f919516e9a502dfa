# SPDX-License-Identifier: Apache-2.0
"""The demo trainer: its model is Mixtral, its adapters are PEFT's, a stopped run goes on."""

from __future__ import annotations

import random

import pytest
import torch

from demo.tasks import TASKS
from demo.training import base as base_training
from demo.training import optimizer
from demo.training.data import make_batch, question
from demo.training.export import write_adapter, write_base
from demo.training.lora import AdapterPlan, initial_adapter, rounded, with_adapter
from demo.training.model import forward, initial_weights
from demo.training.vocabulary import BOS_ID, EOS_ID, TAGS, TOKEN_IDS, encode


def test_question_is_bos_prompt_and_answer_with_eos():
    prompt, answer = question(random.Random(3), "upper", tagged=True)
    assert prompt[:2] == [BOS_ID, TOKEN_IDS[TAGS["upper"]]]
    assert prompt[-1] == TOKEN_IDS["="]
    assert answer[-1] == EOS_ID
    untagged, same_answer = question(random.Random(3), "upper", tagged=False)
    assert (untagged, same_answer) == ([BOS_ID, *prompt[2:]], answer)


def test_batch_asks_for_exactly_the_answers():
    batch = make_batch(random.Random(0), ["reverse", None, "double"], tagged=True)
    followers = torch.cat((batch.tokens[1:], torch.tensor([EOS_ID])))
    is_inside = batch.targets != EOS_ID
    assert torch.equal(followers[batch.asked][is_inside], batch.targets[is_inside])
    assert (batch.targets == EOS_ID).sum() == 3
    assert batch.tokens[batch.asked[0]] == encode("=")[0]


@pytest.fixture(scope="module")
def base():
    return rounded(initial_weights(seed=1))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("form", ["fused", "per_expert"])
def test_written_base_and_adapter_give_the_trainers_logits(form, base, tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    plan = AdapterPlan(name="any", task="reverse", lora_rank=3, num_steps=0, form=form)
    generator = torch.Generator().manual_seed(2)
    factors = rounded(
        {
            name: torch.randn(factor.shape, generator=generator) * 0.1
            for name, factor in initial_adapter(base, plan, seed=0).items()
        }
    )
    write_base(base, tmp_path / "model")
    write_adapter(factors, plan, tmp_path / "adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    batch = make_batch(random.Random(4), [plan.task], tagged=False)
    with torch.no_grad():
        alone = model(batch.tokens[None]).logits[0, batch.asked]
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
        together = adapted(batch.tokens[None]).logits[0, batch.asked]
        ours_alone, ours_together = (
            forward(base, batch)[0],
            forward(with_adapter(base, factors, plan), batch)[0],
        )
    torch.testing.assert_close(ours_alone, alone, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours_together, together, atol=1e-4, rtol=0)
    assert (together - alone).abs().max() > 1e-2


def test_questions_of_a_batch_do_not_see_each_other(base):
    tasks = list(TASKS)[:4]
    together = make_batch(random.Random(5), tasks, tagged=False)
    alone = make_batch(random.Random(5), tasks[:1], tagged=False)
    expected, _ = forward(base, alone)
    logits, _ = forward(base, together)
    torch.testing.assert_close(logits[: len(expected)], expected, atol=1e-4, rtol=0)


@pytest.fixture
def one_thread():
    """Sums in a fixed order: the runs below are compared bit for bit."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("one_thread")
def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(base_training, "_BATCH_QUESTIONS", 4)
    monkeypatch.setattr(base_training, "_REPORT_EVERY", 2)
    monkeypatch.setattr(optimizer, "orthogonalise", lambda matrices: matrices)  # keeps no state
    monkeypatch.setattr(base_training, "share_exact", lambda *_: 0.0)
    straight = base_training.train_base(tmp_path / "straight.pt", seed=0, num_steps=4)
    batches = iter([make_batch] * 3)
    with monkeypatch.context() as patched:
        patched.setattr(base_training, "make_batch", lambda *args, **kwargs: next(batches)(*args, **kwargs))
        with pytest.raises(StopIteration):
            base_training.train_base(tmp_path / "stopped.pt", seed=0, num_steps=4)
    resumed = base_training.train_base(tmp_path / "stopped.pt", seed=0, num_steps=4)
    assert all(torch.equal(resumed[name], weight) for name, weight in straight.items())


def test_orthogonalised_matrices_have_singular_values_near_one():
    matrices = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(3))
    found = torch.linalg.svdvals(optimizer.orthogonalise(matrices))
    assert ((found > 0.6) & (found < 1.3)).all()
