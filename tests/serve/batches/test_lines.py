# SPDX-License-Identifier: Apache-2.0
"""Lines of batch files: order, errors by number, files of results after a death."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import signal

import pytest

from moe_lora.serve.batches.lines import (
    MAX_ID_CHARS,
    MAX_LINE_BYTES,
    MAX_PROBLEMS,
    FileTooLongError,
    Results,
    body_at,
    problem_line,
    read_lines,
    result_line,
    run_lines,
)

CHAT = "/v1/chat/completions"


def line(custom_id: object = "a", **fields: object) -> bytes:
    given = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m"}, **fields}
    return json.dumps(given).encode() + b"\n"


def test_requests_of_an_adapter_lie_together_in_the_order_of_first_lines():
    models = ["b", "a", None, "b", "c", "a", "b"]
    bodies = [{"model": one, "prompt": str(index)} for index, one in enumerate(models)]
    text = b"\n".join(line(f"n{index}", body=body) for index, body in enumerate(bodies))
    file = io.BytesIO(text)
    found = read_lines(file)
    assert [one.custom_id for one in found.lines] == ["n0", "n3", "n6", "n1", "n5", "n2", "n4"]
    assert found.problems == []
    for one in found.lines:
        assert json.loads(body_at(file, one)) == bodies[int(one.custom_id[1:])]


@pytest.mark.parametrize(
    ("text", "body"),
    [
        (b'{"body":{"a":"\xc3\xa9"} , %s}\r\n', b'{"a":"\xc3\xa9"}'),
        (b'\xef\xbb\xbf { %s, "body" : {"x" : [1 , NaN, "}"]} } ', b'{"x" : [1 , NaN, "}"]}'),
        (
            b'{"\xe4\xb8\xad": "\xf0\x9f\x98\x80", %s, "body": {"x": "\\ud83d"}, "b": {"body": 1}}',
            b'{"x": "\\ud83d"}',
        ),
        (b'{"body": 1, %s, "body": {"y": "\xed\xa0\x80"}}\n', b'{"y": "\xed\xa0\x80"}'),
    ],
)
def test_a_body_is_sent_as_it_lies_in_the_file(text, body):
    file = io.BytesIO(line("first") + text.replace(b"%s", b'"custom_id": "a", "url": "%s"' % CHAT.encode()))
    found = read_lines(file)
    assert (found.problems, [body_at(file, one) for one in found.lines][1:]) == ([], [body])


@pytest.mark.parametrize(
    "text", [b'{"a": 1,}', b'{"a": 1} x', b'{"a": 1}}', b"{1: 2}", b"{[1]: 2}", b'{"a" 1}']
)
def test_broken_objects_are_not_json(text):
    [problem] = read_lines(io.BytesIO(text)).problems
    assert "not valid JSON (E" in problem.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{\n", "not valid JSON"),
        (b"\xff\xfe\n", "not valid JSON"),
        (b"[1]\n", "not an object"),
        (b"[" * 100_000 + b"\n", "nested"),
        (b'{"custom_id": "z"}\n', "url="),
        (line(None), "custom_id must be"),
        (line(""), "custom_id must be"),
        (line("x" * 513), "custom_id must be"),
        (line(3), "custom_id must be"),
        (line(method="GET"), "method='GET'"),
        (line(url="/v1/models"), "allowed are /v1/chat/completions"),
        (line(url=[]), "allowed are"),
        (line(body=[]), "body must be an object"),
        (line(body={"stream": True}), "stream is not supported"),
        (line(body={"background": True}), "background is not supported"),
        (line(body={"encoding_format": "bytes"}), "send base64 or float"),
        (line("first"), "line 1 has the custom_id 'first' too"),
        (line(body={"x": "y" * MAX_LINE_BYTES}), "more than"),
        (line(body={"x": "y" * (MAX_LINE_BYTES + (3 << 20))}), "more than"),
    ],
)
def test_a_wrong_line_is_told_by_its_number_and_stops_no_other(text, message):
    file = io.BytesIO(line("first") + b"\n" + text + line("last").rstrip())
    found = read_lines(file)
    assert [one.custom_id for one in found.lines] == ["first", "last"]
    [problem] = found.problems
    assert problem.number == 3
    assert message in problem.message
    assert json.loads(body_at(file, found.lines[1])) == {"model": "m"}


def test_the_first_wrong_lines_have_a_message_and_the_others_are_a_number():
    found = read_lines(io.BytesIO(b"x\n" * 5000 + line()))
    assert [one.number for one in found.problems] == list(range(1, MAX_PROBLEMS + 1))
    assert found.num_wrong == 5000
    assert found.further == f"{5000 - MAX_PROBLEMS} further wrong lines"
    assert len(found.lines) == 1
    assert read_lines(io.BytesIO(b"x\n" * MAX_PROBLEMS)).further is None


@pytest.mark.parametrize("wrong", [b"x\n", b"\n"])
def test_a_file_with_too_many_lines_is_refused_while_it_is_read(wrong):
    right = line("a") + line("b")
    assert len(read_lines(io.BytesIO(right + b"\n\n"), most=2).lines) == 2
    file = io.BytesIO(right + wrong * 100_000)
    with pytest.raises(FileTooLongError, match="more than 2 requests"):
        read_lines(file, most=2)
    assert file.tell() < 1000


def test_the_place_of_a_request_holds_no_long_text():
    one = read_lines(io.BytesIO(line(body={"model": "m" * 100_000}))).lines[0]
    assert len(one.model) == MAX_ID_CHARS


def test_a_line_has_a_limit_of_bytes():
    text = line("a", body={"x": "y" * 2000}) + line("b")
    found = read_lines(io.BytesIO(text), most_line_bytes=1000)
    assert [one.custom_id for one in found.lines] == ["b"]
    assert "more than 1000 bytes" in found.problems[0].message


def test_results_go_on_after_a_torn_line(tmp_path):
    path = tmp_path / "out"
    results = Results(str(path))
    results.add(result_line("good", 200, "r1", {"x": "é\n"}), "good", is_whole=True)
    results.add(result_line("bad", 404, "r2", {"error": {}}), "bad", is_whole=False)
    results.add(problem_line("gone", "batch_cancelled", "why"), "gone", is_whole=False)
    results.close()
    whole = path.read_bytes()
    torn = result_line("torn", 200, "r3", {})
    for size in (1, 9, 20, len(torn) - 1):
        path.write_bytes(whole + torn[:size])
        again = Results(str(path))
        assert again.finished == {"good": True, "bad": False, "gone": False}
        again.close()
        assert path.read_bytes() == whole
    first = json.loads(whole.splitlines()[0])
    assert first["custom_id"] == "good"
    assert first["response"] == {"status_code": 200, "request_id": "r1", "body": {"x": "é\n"}}
    assert first["error"] is None


def test_a_failed_write_leaves_no_torn_row(tmp_path):
    path, text = tmp_path / "out", result_line("a", 200, "r", {"x": "y" * 1000})
    results, before = Results(str(path)), resource.getrlimit(resource.RLIMIT_FSIZE)
    results.add(text, "a", is_whole=True)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(text) + 500, before[1]))
        with pytest.raises(OSError, match="too large"):
            results.add(text, "b", is_whole=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == text
    assert results.finished == {"a": True}
    results.add(text, "b", is_whole=True)
    assert path.read_bytes() == text * 2
    results.close()


def test_results_are_split_by_status_also_after_a_restart(tmp_path):
    rows = [result_line(f"n{index}", (200, 404)[index % 2], "r", {}) for index in range(6)]
    results = Results(str(tmp_path / "out"))
    for index, row in enumerate(rows[:3]):
        results.add(row, f"n{index}", is_whole=not index % 2)
    results.close()
    results = Results(str(tmp_path / "out"))
    for index, row in enumerate(rows[3:], 3):
        results.add(row, f"n{index}", is_whole=not index % 2)
    assert results.num_bytes == sum(map(len, rows))
    results.close()
    results.split(tmp_path / "whole", tmp_path / "others", [b"end\n"])
    assert (tmp_path / "whole").read_bytes() == b"".join(rows[::2])
    assert (tmp_path / "others").read_bytes() == b"".join([*rows[1::2], b"end\n"])


@pytest.mark.parametrize("content", [b"notes", b"notes\n", b"[1]\n", b'{"custom_id": "a"}\n', b'{"id": 1'])
def test_other_files_are_left_as_they_are(tmp_path, content):
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="line 1 is no result"):
        Results(str(path))
    assert path.read_bytes() == content


def test_a_pipe_is_refused(tmp_path):
    """A run reads its results first, and a pipe never ends."""
    os.mkfifo(path := tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: no regular file"):
        Results(str(path))


def test_one_process_at_a_time_writes_results(tmp_path):
    first = Results(str(tmp_path / "out"))
    with pytest.raises(ValueError, match="another process"):
        Results(str(tmp_path / "out"))
    first.close()
    Results(str(tmp_path / "out")).close()


def test_lines_run_in_order_some_at_once_until_the_first_error():
    lines = read_lines(io.BytesIO(b"".join(line(f"n{index}") for index in range(9)))).lines
    begun, running, most = [], 0, 0

    async def work(one):
        nonlocal running, most
        begun.append(one.number)
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(0)
            if one.number == 7:
                raise KeyError(one.number)
        finally:
            running -= 1

    asyncio.run(run_lines(lines[:6], 3, work))
    assert (begun, most, running) == ([1, 2, 3, 4, 5, 6], 3, 0)
    with pytest.raises(KeyError, match="7"):
        asyncio.run(run_lines(lines[6:], 1, work))
    assert (begun[6:], running) == ([7], 0)


def test_a_wrong_line_has_its_readable_id_unless_another_line_has_it():
    wrong = {"url": "/v1/other"}
    text = line("a", **wrong) + line("b") + line("b", **wrong) + line("c") * 2 + line(5) + b"nonsense\n"
    text += line("d", **wrong) * 2
    found = read_lines(io.BytesIO(text))
    assert [one.custom_id for one in found.lines] == ["b", "c"]
    assert [(one.number, one.custom_id) for one in found.problems] == [
        (1, "a"),
        (3, None),
        (5, None),
        (6, None),
        (7, None),
        (8, None),
        (9, None),
    ]
