# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer publishes each epoch to a real server."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainerControl, TrainerState, TrainingArguments

from moe_lora.core.errors import AdapterError
from moe_lora.integrations import callback as callback_module
from moe_lora.integrations.callback import PublishEachEpoch
from moe_lora.integrations.publisher import (
    BusyServerError,
    NoAnswerError,
    Publisher,
    adapter_config,
    adapter_tensors,
)
from tests.serve.demo_server import DEMO, demo_server
from tests.serve.test_controls import Http

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PROMPT, NUM_TOKENS = [1, 40, 41, 42], 6


def model() -> Any:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS))


@torch.inference_mode()
def greedy(trained: Any) -> list[int]:
    found = list(PROMPT)
    for _ in range(NUM_TOKENS):
        found.append(int(trained(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(PROMPT) :]


def answered(http: Http, name: str) -> tuple[list[int], int]:
    body = {"model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    [choice] = http.ok("POST", "/v1/completions", json={**body, "return_token_ids": True})["choices"]
    return choice["token_ids"], choice["adapter_version"]


def test_each_epoch_is_a_version_and_the_last_answers_as_the_trained_model(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, *range(40, 48)], "labels": [1, *range(50, 58)]}] * 2
    with demo_server(tmp_path / "log", "--eager", "--dtype", "float32") as server:
        callback = PublishEachEpoch(f"{server.url}/v1", "tuned")
        args = TrainingArguments(
            str(tmp_path / "out"),
            num_train_epochs=3,
            learning_rate=0.05,
            per_device_train_batch_size=2,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=model(), args=args, train_dataset=rows, callbacks=[callback])
        trainer.train()
        assert callback.versions == [1, 2, 3]
        found, version = answered(Http(server.url), "tuned")
    assert version == 3
    trained = trainer.model.eval()
    assert found == greedy(trained)
    with trained.disable_adapter():
        assert found != greedy(trained)


class Weight(torch.nn.Module):
    """(w - 1)²: at a learning rate of 1.05 each step overshoots, and the loss grows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(0.0))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.w - 1) ** 2 + 0 * x.sum(), "logits": x}


class Recorded:
    """A publisher's part in one training.  published: (the training's number, weight)."""

    published: ClassVar[list[tuple[int, float]]] = []
    num_opened = 0

    def __init__(self, *server: Any) -> None:
        Recorded.num_opened += 1
        self._number = Recorded.num_opened

    def publish(self, weight: float, config: Any) -> int:
        self.published.append((self._number, weight))
        return len(self.published)

    def check_server(self) -> None: ...

    def close(self) -> None:
        self._number = -1


def test_the_best_model_is_the_last_version_and_each_training_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "published", [])
    monkeypatch.setattr(callback_module, "Publisher", Recorded)
    monkeypatch.setattr(callback_module, "adapter_config", lambda trained, adapter: {})
    monkeypatch.setattr(callback_module, "adapter_tensors", lambda trained, adapter: trained.w.item())
    rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 2
    args = TrainingArguments(
        str(tmp_path),
        num_train_epochs=3,
        learning_rate=1.05,
        optim="sgd",
        lr_scheduler_type="constant",
        per_device_train_batch_size=2,
        use_cpu=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
    )
    callback = PublishEachEpoch("http://server", "tuned")
    trainer = Trainer(model=Weight(), args=args, train_dataset=rows, eval_dataset=rows, callbacks=[callback])
    for number in (1, 2):
        trainer.train()
        published = [weight for one, weight in Recorded.published if one == number]
        assert published[-1] == trainer.model.w.item() == published[0] != published[2]
    assert callback.versions == [*range(1, len(Recorded.published) + 1)]


class Failing(Recorded):
    """Fails at the numbers of `failing`, counted from 1."""

    failing: ClassVar[tuple[int, ...]] = ()
    num_calls = 0

    def publish(self, weight: float, config: Any) -> int:
        Failing.num_calls += 1
        if Failing.num_calls in self.failing:
            raise NoAnswerError("no answer")
        return super().publish(weight, config)


@pytest.mark.parametrize(
    ("failing", "published"),
    [((1,), [2.0, 3.0]), ((1, 2), [3.0]), ((3,), [1.0, 2.0, 3.0]), ((3, 4), [1.0, 2.0])],
)
def test_a_failed_publication_ends_no_training_and_the_last_one_is_sent_again(
    failing: tuple[int, ...],
    published: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Failing, "failing", failing)
    monkeypatch.setattr(Failing, "num_calls", 0)
    monkeypatch.setattr(Recorded, "published", [])
    gathered: dict[bool, list[float]] = {True: [], False: []}
    monkeypatch.setattr(callback_module, "Publisher", Failing)
    monkeypatch.setattr(callback_module, "adapter_config", lambda trained, adapter: {})
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for is_first in (False, True):
        monkeypatch.setattr(
            callback_module,
            "adapter_tensors",
            lambda trained, adapter, is_first=is_first: gathered[is_first].append(trained) or trained,
        )
        callback, control = PublishEachEpoch("http://server", "tuned"), TrainerControl()
        state = TrainerState(is_world_process_zero=is_first)
        callback.on_train_begin(args, state, control)
        for epoch in (1, 2, 3):
            state.global_step = epoch
            callback.on_epoch_end(args, state, control, model=float(epoch))
        with pytest.raises(AdapterError) if is_first and 4 in failing else nullcontext():
            callback.on_train_end(args, state, control, model=3.0)
        assert callback._publisher._number == -1  # closed
    assert [weight for _, weight in Recorded.published] == published
    assert gathered[True] == gathered[False] == [1.0, 2.0, 3.0]
    assert [record.args[0] for record in caplog.records] == [one for one in failing if one < 4]


def started(answers: list[httpx.Response], folder: Path, monkeypatch: pytest.MonkeyPatch) -> PublishEachEpoch:
    """A callback at its training's start, whose server gives these answers."""
    monkeypatch.setattr(callback_module, "adapter_config", lambda trained, adapter: {})
    monkeypatch.setattr(callback_module, "adapter_tensors", lambda trained, adapter: {})
    transport = httpx.MockTransport(lambda request: answers.pop(0))
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=transport))
    callback = PublishEachEpoch("http://server", "tuned")
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[])
    callback.on_train_begin(args, TrainerState(), TrainerControl())
    return callback


def test_a_refusal_ends_the_training_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = httpx.Response(400, json={"error": {"message": "NaN"}})
    answers = [httpx.Response(200, json={"version": "1"}), httpx.Response(503), nan]
    callback, control = started(answers, tmp_path, monkeypatch), TrainerControl()
    callback.on_epoch_end(None, TrainerState(global_step=1), control, model=None)
    with pytest.raises(AdapterError, match="NaN"):
        callback.on_epoch_end(None, TrainerState(global_step=2), control, model=None)


def clock_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The callback's clock, which pauses alone move."""
    now_s = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now_s[0], sleep=lambda pause_s: now_s.append(now_s.pop() + pause_s)
    )
    monkeypatch.setattr(callback_module, "time", clock)
    return now_s


def busy() -> httpx.Response:
    body = {"error": {"message": "a slot is held", "type": "ServiceUnavailableError", "code": 503}}
    return httpx.Response(503, headers={"Retry-After": "5"}, json=body)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_busy_server_is_waited_for(is_last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = clock_of(monkeypatch)
    answers = [httpx.Response(200, json={"version": "1"}), busy(), busy()]
    answers.append(httpx.Response(200, json={"id": "tuned", "version": 4}))
    callback, control = started(answers, tmp_path, monkeypatch), TrainerControl()
    end = callback.on_train_end if is_last else callback.on_epoch_end
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    end(args, TrainerState(global_step=1), control, model=None)
    assert callback.versions == [4]
    assert now_s == [10.0], "the server's Retry-After twice"


@pytest.mark.parametrize("is_last", [False, True])
def test_a_server_busy_to_the_wait_s_end_is_an_error_after_the_last_epoch_alone(
    is_last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = clock_of(monkeypatch)
    answers = [httpx.Response(200, json={"version": "1"}), *(busy() for _ in range(61))]
    callback, control = started(answers, tmp_path, monkeypatch), TrainerControl()
    end = callback.on_train_end if is_last else callback.on_epoch_end
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(BusyServerError, match="a slot is held") if is_last else nullcontext():
        end(args, TrainerState(global_step=1), control, model=None)
    assert (callback.versions, answers, now_s) == ([], [], [callback_module.BUSY_S])
    assert callback._publisher._http.is_closed == is_last
    assert ("step 1 is not published" in caplog.text) != is_last


def test_a_proxy_s_503_is_no_busy_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = clock_of(monkeypatch)
    proxy = httpx.Response(503, headers={"Retry-After": "5"}, json={"error": {"message": "no backend"}})
    own = busy()
    del own.headers["Retry-After"]
    for answer in (proxy, own, httpx.Response(502, headers={"Retry-After": "5"}, text="<html>")):
        answers = [httpx.Response(200, json={"version": "1"}), answer]
        callback, control = started(answers, tmp_path, monkeypatch), TrainerControl()
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        with pytest.raises(NoAnswerError, match=r"no backend|a slot is held|status 502"):
            callback.on_train_end(args, TrainerState(global_step=1), control, model=None)
        assert now_s == [0.0], "no wait"


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(404, json={"detail": "Not Found"}), httpx.Response(502), httpx.Response(200, text="hi")],
)
def test_a_wrong_url_ends_the_training_before_its_first_epoch(
    answer: httpx.Response, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AdapterError, match=f"status {answer.status_code}"):
        started([answer], tmp_path, monkeypatch)


def test_a_refusal_has_the_server_s_reason(tmp_path: Path) -> None:
    trained = model()
    tensors = adapter_tensors(trained)
    name, first = next(iter(tensors.items()))
    with demo_server(tmp_path / "log", "--eager") as server:
        publisher = Publisher(server.url, "refused")
        with pytest.raises(AdapterError, match="NaN"):
            publisher.publish({**tensors, name: torch.full_like(first, torch.nan)}, adapter_config(trained))
        with pytest.raises(AdapterError, match="cannot be found"):
            publisher.remove()
        assert publisher.publish(tensors, adapter_config(trained)) == 1
        publisher.remove()
