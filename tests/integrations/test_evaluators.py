# SPDX-License-Identifier: Apache-2.0
"""Load generators and lm-eval run against the server, each as its own command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_lora.engine.text.text import load_tokenizer
from tests.oracle import reference_logits
from tests.patience import PATIENCE_S
from tests.serve.demo_server import DEMO, demo_server

pytestmark = pytest.mark.slow

MODEL, UPPER = DEMO / "model", DEMO / "adapters" / "upper"
NUM, NUM_TOKENS = 6, 8
TASK = """
task: choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
QUESTIONS = [
    {"question": "hello world=", "choices": ["HELLO", "hello world", "x"], "answer": 0},
    {"question": "abc=", "choices": ["ABC", "cba"], "answer": 1},
]


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Any:
    log = tmp_path_factory.mktemp("evaluators") / "log"
    adapters = ("--lora-dir", str(DEMO / "adapters"))
    with demo_server(log, *adapters, "--eager", "--dtype", "float32") as server:
        yield server.url


def run(name: str, *args: str) -> None:
    """Skips the test without the command."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"the command {name} is not installed; pip install {name.replace('_', '-')}")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run([path, *args], env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_guidellm_counts_every_request(url, tmp_path):
    file = tmp_path / "found.json"
    run(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={url},model=upper"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM}"),
        *("--tokenizer", f"kind=hf_auto,model={MODEL}", "--output", f"kind=json,path={file}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={NUM_TOKENS}"),
        "--disable-console",
    )
    [found] = json.loads(file.read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {
        **{"successful": NUM, "errored": 0, "incomplete": 0, "total": NUM}
    }
    answers = found["requests"]["successful"]
    assert [one["output_tokens"] for one in answers] == [NUM_TOKENS] * NUM
    assert all(one["prompt_tokens"] > 16 for one in answers)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve_counts_every_request(backend, url, tmp_path):
    path = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    run(
        *("vllm", "bench", "serve", "--backend", backend, "--base-url", url, "--endpoint", path),
        *("--model", "upper", "--tokenizer", str(MODEL), "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", "16", "--random-output-len", str(NUM_TOKENS), "--num-prompts", str(NUM)),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "found.json"),
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"]) == (NUM, 0)
    assert found["total_output_tokens"] == NUM * NUM_TOKENS


def test_lm_evals_likelihoods_are_transformers_s(url, tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    (tmp_path / "choices.yaml").write_text(TASK.format(file=questions))
    model = f"model=upper,base_url={url}/v1/completions,tokenizer={MODEL},max_length=256"
    run(
        *("lm_eval", "--model", "local-completions", "--tasks", "choices", "--include_path", str(tmp_path)),
        *("--model_args", f"{model},tokenizer_backend=huggingface,num_concurrent=2"),
        *("--output_path", str(tmp_path / "out"), "--log_samples"),
    )
    [file] = (tmp_path / "out").rglob("samples_choices*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    for sample in sorted(samples, key=lambda one: one["doc_id"]):
        question = QUESTIONS[sample["doc_id"]]
        for choice, (found, is_greedy) in zip(question["choices"], sample["filtered_resps"], strict=True):
            expected, is_best = likelihood(question["question"], choice)
            assert float(found) == pytest.approx(expected, abs=1e-3)
            assert str(is_greedy) == str(is_best)
    assert sorted(one["doc_id"] for one in samples) == [0, 1]


def likelihood(context: str, text: str) -> tuple[float, bool]:
    """Log probability of the text, and whether each of its tokens is the likeliest; without a first token of
    the tokenizer, as lm-eval sends."""
    tokenizer = load_tokenizer(Path(MODEL))
    assert tokenizer is not None
    whole, context_ids = (
        tokenizer.encode(one, add_special_tokens=False) for one in (context + text, context)
    )
    scores = torch.log_softmax(reference_logits(MODEL, UPPER, whole), dim=-1)[len(context_ids) - 1 : -1]
    chosen = torch.tensor(whole[len(context_ids) :])
    return float(scores.gather(1, chosen[:, None]).sum()), bool((scores.argmax(-1) == chosen).all())
