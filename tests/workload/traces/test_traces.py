# SPDX-License-Identifier: Apache-2.0
"""Trace readers on small hand-written files of every format, odd ones included."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from moe_lora.workload.traces.records import TraceRequest
from moe_lora.workload.traces.traces import FORMATS, detect_format, iter_trace, read_trace, spread

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319601,3180,8"
)
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,a,1.2,ChatGPT,472,18,490,Conversation log\n"
    "45,b,,GPT-4,1087,0,1087,API log\n"
    "118.5,c,2,ChatGPT,417,276,693,Conversation log\n"
)
MOONCAKE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
    "\n"
    '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2353]}\n'
)
OWN = (
    '{"arrival_s": 0.5, "prompt_tokens": 7, "output_tokens": 3}\n'
    '{"arrival_s": 2, "prompt": "one two three", "output_tokens": 4, "adapter": "reverse"}\n'
)
SHAREGPT = json.dumps(
    [
        {
            "id": "1",
            "conversations": [{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "x" * 40}],
        },
        {"id": "2", "conversations": [{"from": "human", "value": "alone"}]},
        {
            "id": "3",
            "conversations": [{"from": "human", "value": "ünï {]"}, {"from": "gpt", "value": "y"}],
        },
    ],
    indent=1,
    ensure_ascii=False,
)
LMSYS = "".join(
    json.dumps({"conversation_id": "c", "model": model, "conversation": turns, "turn": 1, "redacted": False})
    + "\n"
    for model, turns in (
        ("vicuna", [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "y"}]),
        ("koala", [{"role": "user", "content": "alone"}]),
        ("koala", [{"content": "c", "role": "user"}, {"content": "z z z", "role": "assistant"}]),
    )
)
VLLM = '{"prompt": "one two three", "output_tokens": 10}\n{"prompt": "x", "more": 1}\n'
QWEN_BAILIAN = (
    '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.061, "input_length": 40, "output_length": 9, '
    '"type": "text", "turn": 1, "hash_ids": [1, 2, 3]}\n'
)
SAMPLES = {
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "mooncake": MOONCAKE,
    "own": OWN,
    "sharegpt": SHAREGPT,
    "lmsys": LMSYS,
    "vllm": VLLM,
    "bailian": QWEN_BAILIAN,
}


def write(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_every_format_has_a_sample() -> None:
    assert set(SAMPLES) == set(FORMATS)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_format_is_detected_with_and_without_byte_order_mark(tmp_path: Path, name: str, start: str) -> None:
    path = write(tmp_path, start + SAMPLES[name])
    assert detect_format(path) == name
    assert read_trace(path).requests == read_trace(path, name).requests


def test_format_is_detected_where_text_has_unicode_s_line_ends(tmp_path: Path) -> None:
    row = '{"prompt": "a\u2028b\x85c", "output_tokens": 10}'
    assert detect_format(write(tmp_path, row)) == "vllm"


def test_azure_keeps_seven_fractional_digits(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE))
    assert trace.requests[0] == TraceRequest(0.0, 4808, 10)
    assert trace.requests[1].arrival_s == pytest.approx(0.0520001, abs=1e-9)
    assert trace.has_arrival_times


def test_azure_2024_times_with_zone_and_more_columns_in_another_order(tmp_path: Path) -> None:
    text = (
        "GeneratedTokens, timestamp ,Region,ContextTokens\n"
        "5,2024-05-10 23:59:59.5+00:00,eu,9\n"
        "6,2024-05-11T02:00:01+02:00,us,8\n"
    )
    assert read_trace(write(tmp_path, text)).requests == (TraceRequest(0.0, 9, 5), TraceRequest(1.5, 8, 6))


def test_burstgpt_drops_failed_requests_and_counts_them(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, BURSTGPT))
    assert trace.requests == (TraceRequest(0.0, 472, 18), TraceRequest(113.5, 417, 276))
    assert trace.dropped == {"no output tokens (failed request)": 1}


def test_burstgpt_of_the_older_release_lacks_two_columns(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,4,2,6,API log\n"
    assert read_trace(write(tmp_path, text)).requests == (TraceRequest(0.0, 4, 2),)


def test_mooncake_keeps_hash_ids_and_turns_milliseconds_to_seconds(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, MOONCAKE)).requests
    assert first == TraceRequest(0.0, 6955, 52, hash_ids=(46, 47))
    assert second.arrival_s == pytest.approx(3.053)


def test_sharegpt_estimates_lengths_keeps_text_and_has_no_times(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, SHAREGPT))
    assert trace.requests == (
        TraceRequest(0.0, 3, 10, prompt="a b c"),
        TraceRequest(0.0, 2, 1, prompt="ünï {]"),
    )
    assert trace.dropped == {"fewer than two turns": 1}
    assert not trace.has_arrival_times


def test_sharegpt_larger_than_one_read_comes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lora.workload.traces.formats._CHUNK_CHARS", 7)
    assert len(read_trace(write(tmp_path, SHAREGPT)).requests) == 2


def test_own_format_takes_adapter_and_prompt(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, OWN)).requests == (
        TraceRequest(0.0, 7, 3),
        TraceRequest(1.5, 4, 4, adapter="reverse", prompt="one two three"),
    )


def test_lmsys_takes_the_model_as_adapter(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, LMSYS))
    assert trace.requests == (
        TraceRequest(0.0, 2, 1, adapter="vicuna", prompt="a b"),
        TraceRequest(0.0, 1, 3, adapter="koala", prompt="c"),
    )
    assert trace.dropped == {"fewer than two turns": 1}
    assert not trace.has_arrival_times
    array = write(tmp_path, "[" + ",".join(LMSYS.splitlines()) + "]", "array")
    assert read_trace(array).requests == trace.requests


def test_lmsys_export_with_times_keeps_them(tmp_path: Path) -> None:
    rows = [{**json.loads(line), "tstamp": 1e9 + i} for i, line in enumerate(LMSYS.splitlines()) if i != 1]
    trace = read_trace(write(tmp_path, json.dumps(rows)))
    assert [request.arrival_s for request in trace.requests] == [0.0, 2.0]
    assert trace.has_arrival_times
    del rows[1]["tstamp"]
    with pytest.raises(ValueError, match="column 'tstamp'"):
        read_trace(write(tmp_path, json.dumps(rows)))


def test_vllm_rows_without_a_length_get_vllms_default(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, VLLM))
    assert [(r.prompt, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        ("one two three", 4, 10),
        ("x", 1, 256),
    ]
    assert not trace.has_arrival_times


def test_reader_is_a_stream(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + "\r\nnonsense")
    assert next(iter_trace(path)).prompt_tokens == 4808


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (QWEN_BAILIAN.replace("40", "32"), "3 blocks of 32 tokens; allowed: 2 at most, one a block of 16"),
        (
            QWEN_BAILIAN.replace("chat_id", "c"),
            "3 blocks of 40 tokens; allowed: 1 at most, one a block of 512",
        ),
        (
            OWN + '{"arrival_s": 2, "prompt_tokens": 512, "output_tokens": 1, "hash_ids": [1, 2]}',
            "2 blocks of",
        ),
    ],
)
def test_blocks_of_other_sizes_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_trace(write(tmp_path, text))


def test_a_bailian_trace_has_seconds_and_its_blocks_of_16_tokens_joined(tmp_path: Path) -> None:
    turns = [
        (0.5, [*range(64)]),
        (2.0, [*range(70)]),
        (2.5, [*range(32), *range(90, 122)]),
        (3.0, [*range(70)]),
    ]
    rows = [
        {"chat_id": i, "parent_chat_id": i - 1, "timestamp": at_s, "input_length": 16 * len(ids) - 3}
        | {"output_length": 9, "type": "text", "turn": i + 1, "hash_ids": ids}
        for i, (at_s, ids) in enumerate(turns)
    ]
    path = write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(path)
    assert (trace.format, [one.arrival_s for one in trace.requests]) == ("bailian", [0.0, 1.5, 2.0, 2.5])
    assert [one.prompt_tokens for one in trace.requests] == [1021, 1117, 1021, 1117]
    first, longer, other, again = (one.hash_ids for one in trace.requests)
    assert longer[:2] == first
    assert other[0] == first[0]
    assert again == longer
    assert len({*first, *longer, *other}) == 4, "blocks with another beginning are others"


def test_a_bailian_trace_is_no_mooncake_trace(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="column 'chat_id': a Qwen-Bailian trace, with seconds and blocks of 16"
    ):
        read_trace(write(tmp_path, QWEN_BAILIAN), "mooncake")


def test_a_part_of_a_trace_is_runs_of_all_of_it() -> None:
    rows = [TraceRequest(float(i), 1 + i, 1) for i in range(2400)]
    part = list(spread(rows, 2400, 120))
    assert [one.prompt_tokens - 1 for one in part] == [200 * run + i for run in range(12) for i in range(10)]
    assert [one.arrival_s for one in part] == [float(i) for i in range(120)]
    assert list(spread(rows, 2400, 2400)) == rows
    assert len(list(spread(rows, 2400, 5))) > 0


def test_stream_counts_what_it_drops(tmp_path: Path) -> None:
    dropped: Counter[str] = Counter()
    assert len(list(iter_trace(write(tmp_path, BURSTGPT), dropped=dropped))) == 2
    assert sum(dropped.values()) == 1


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER + "2023-11-16 18:17:03.9,many,10\n", ["line 2", "'ContextTokens'", "'many'", ">= 0"]),
        (HEADER + "2023-11-16 18:17:03.9,1,-1\n", ["line 2", "'GeneratedTokens'", "'-1'", ">= 0"]),
        (HEADER + "2023-11-16 18:17:03.9,1.5,1\n", ["line 2", "'ContextTokens'", "'1.5'"]),
        (HEADER + "yesterday,1,1\n", ["line 2", "'TIMESTAMP'", "YYYY-MM-DD"]),
        (HEADER + "2023-13-16 18:17:03.9,1,1\n", ["line 2", "'TIMESTAMP'"]),
        (HEADER + "2023-11-16 18:17:03.9,1\n", ["line 2", "'GeneratedTokens'", "2 columns"]),
        (HEADER + "2023-11-16 18:17:03,1,1\n2023-11-16 18:17:02,1,1\n", ["line 3", "back in time", "sort"]),
        (HEADER, ["no request in the trace"]),
        (BURSTGPT.splitlines()[0] + "\n1,a,,m,5,0,5,l\n", ["no request in the trace", "1 rows: no output"]),
        ("Timestamp,Request tokens,Response tokens\nnan,1,1\n", ["line 2", "'Timestamp'", "finite"]),
        ("", ["empty"]),
        (
            "who,what\n1,2\n",
            ["line 1", "'who,what'", "azure, burstgpt, mooncake, sharegpt, lmsys, vllm, own"],
        ),
        ('{"timestamp": 1, "input_length": 2}\n', ["line 1", "'output_length'", "missing"]),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}\n', ["'input_length'", "True"]),
        (MOONCAKE + "{broken\n", ["line 4", "not JSON"]),
        (MOONCAKE + "[1]\n", ["line 4", "JSON object"]),
        ('{"timestamp": 1, "input_length": 2, "output_length": 2, "hash_ids": "no"}\n', ["'hash_ids'"]),
        (
            '{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 2, "adaptor": "x"}\n',
            ["unknown key", "adapter"],
        ),
        ('{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 2, "adapter": 5}\n', ["'adapter'", "text"]),
        ('[{"conversations": 5}]', ["line 1", "'conversations'", "list of turns"]),
        ('[{"conversations": [{"from": "human"}, {"value": "x"}]}]', ["'value'", "turns of the form"]),
        (SHAREGPT[:-5], ["not JSON"]),
        ("Timestamp,Request tokens,Response tokens\n-1,1,1\n", ["line 2", "'Timestamp'", "negative"]),
        ('{"timestamp": -5, "input_length": 2, "output_length": 2}\n', ["line 1", "'timestamp'", ">= 0"]),
        ('{"timestamp": 1, "input_length": 1' + "0" * 400 + ', "output_length": 2}\n', ["not finite"]),
        ('{"timestamp": 1, "input_length": 2, "x": ' + "[" * 100_000 + "\n", ["line 1"]),
        (HEADER + '2023-11-16 18:17:03.9,"' + "1" * 140_000 + '",1\n', ["line 2", "not CSV"]),
        (HEADER + "2023-11-16 18:17:03.9,1e300,1\n", ["line 2", "'ContextTokens'", "<= 2147483647"]),
        (LMSYS.replace('"koala"', "5"), ["line 2", "'model'"]),
        ('{"prompt": null}\n', ["line 1", "'prompt'", "non-empty"]),
    ],
)
def test_bad_trace_is_refused_with_the_place_and_what_is_allowed(
    tmp_path: Path, text: str, said: list[str]
) -> None:
    path = write(tmp_path, text, "bad.trace")
    with pytest.raises(ValueError, match=r"bad\.trace") as caught:
        read_trace(path)
    for words in said:
        assert words in str(caught.value)


def test_missing_file_and_unknown_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="readable file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(ValueError, match="choose one of azure"):
        read_trace(write(tmp_path, AZURE), "orca")


@pytest.mark.parametrize("format", [None, "azure"])
def test_compressed_trace_is_refused_by_its_name(tmp_path: Path, format: str | None) -> None:
    (tmp_path / "t.csv").write_bytes(b"\x1f\x8b\x08\xff\xfe")
    with pytest.raises(ValueError, match=r"t\.csv: not UTF-8 text"):
        read_trace(tmp_path / "t.csv", format)


def test_wrong_format_names_the_missing_column(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no column 'Request tokens'"):
        read_trace(write(tmp_path, AZURE), "burstgpt")


SHARED = Path(__file__).resolve().parents[4] / "shared" / "traces"


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("name", "format", "num_requests", "duration_s"),
    [
        ("azure_llm_2023_code.csv", "azure", 8819, 3435.948056),
        ("mooncake_synthetic.jsonl", "mooncake", 3993, 1022.025),
    ],
)
def test_real_traces_are_read_whole(name: str, format: str, num_requests: int, duration_s: float) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not there")
    trace = read_trace(SHARED / name)
    assert (trace.format, len(trace.requests), trace.dropped) == (format, num_requests, {})
    assert trace.requests[-1].arrival_s == pytest.approx(duration_s, abs=1e-6)
