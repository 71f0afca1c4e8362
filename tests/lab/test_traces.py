"""Traces: the published ones as they are, a user's own, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.lab import traces
from octavo.lab.work import token_ids
from tests.conftest import SHARED

AZURE, MOONCAKE = "TIMESTAMP,ContextTokens,GeneratedTokens\n", ("timestamp", "input_length", "output_length")
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def published(name: str) -> Path:
    path = SHARED / "traces" / name
    if not path.is_file():
        pytest.skip(f"../shared/traces/{name} is not beside the repository; its publisher is named in traces.py")
    return path


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


class TestPublished:
    """Counts and means as their papers' authors published them."""

    def test_azure(self) -> None:
        work = traces.read(published("azure_conv_2023.csv"))
        arrivals = work.arrivals
        assert len(arrivals) == 19_366
        assert sum(a.prompt_tokens for a in arrivals) / len(arrivals) == pytest.approx(1154.70, abs=0.01)
        assert sum(a.output_tokens for a in arrivals) / len(arrivals) == pytest.approx(211.13, abs=0.01)
        assert (arrivals[0].at, arrivals[1].at) == (0.0, 4.314579)  # 18:15:46.6805900 and 18:15:50.9951690
        assert arrivals[-1].at == pytest.approx(3501.721937)
        assert len({number for a in arrivals for number, _ in a.prompt}) == len(arrivals)  # nothing is shared
        assert "CC-BY" in work.source

    def test_mooncake(self) -> None:
        arrivals = traces.read(published("mooncake_conversation.jsonl")).arrivals
        assert len(arrivals) == 12_031
        assert sum(a.prompt_tokens for a in arrivals) / len(arrivals) == pytest.approx(12_035.06, abs=0.01)
        assert sum(a.output_tokens for a in arrivals) / len(arrivals) == pytest.approx(342.62, abs=0.01)
        assert arrivals[-1].at == 3536.999
        assert len({number for a in arrivals for number, _ in a.prompt}) == 182_790  # different blocks
        assert {a.prompt[0] for a in arrivals if a.prompt_tokens >= 512} == {arrivals[0].prompt[0]}  # one system prompt

    def test_a_part(self) -> None:
        path = published("azure_conv_2023.csv")
        whole = traces.read(path).arrivals
        assert traces.read(path, limit=10).arrivals == whole[:10]
        minute = traces.read(path, seconds=60).arrivals
        assert minute == tuple(a for a in whole if a.at < 60)
        assert 0 < len(minute) < len(whole)


requests = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(1, 3000), st.integers(1, traces.MAX_TOKENS)), min_size=1, max_size=8
)


class TestFormats:
    """What is written is read."""

    @quick
    @given(requests)
    def test_csv_in_any_order(self, tmp_path: Path, rows: list[tuple[int, int, int]]) -> None:
        text = AZURE + "".join(f"{at / 1e6!r},{prompt},{output}\n" for at, prompt, output in rows)
        arrivals = traces.read(written(tmp_path, text)).arrivals
        first = min(at for at, _, _ in rows)
        assert [(round(a.at * 1e6), a.prompt_tokens, a.output_tokens) for a in arrivals] == [
            (at - first, prompt, output) for at, prompt, output in sorted(rows, key=lambda row: row[0])
        ]
        assert all(a.output_tokens <= a.max_tokens <= max(256, 2 * a.output_tokens) for a in arrivals)

    @quick
    @given(requests, st.data())
    def test_jsonl_shares_exactly_the_blocks_of_equal_hashes(
        self, tmp_path: Path, rows: list[tuple[int, int, int]], data: st.DataObject
    ) -> None:
        lines, ids = [], []
        for place, row in enumerate(rows):
            shared = data.draw(st.integers(0, row[1] // 512), "full blocks that are the first prompts' too")
            ids.append([*range(shared), *range(100 * (place + 1), 100 * (place + 1) + -(-row[1] // 512) - shared)])
            lines.append(json.dumps({**dict(zip(MOONCAKE, (0, *row[1:]), strict=True)), "hash_ids": ids[-1]}))
        arrivals = traces.read(written(tmp_path, "\n".join(lines))).arrivals
        tokens = [token_ids(a.prompt, 50_000).tolist() for a in arrivals]
        assert [len(t) for t in tokens] == [prompt for _, prompt, _ in rows]
        for one, own in zip(tokens, ids, strict=True):
            for other, others in zip(tokens, ids, strict=True):
                alike = next((i for i, (x, y) in enumerate(zip(own, others, strict=False)) if x != y), None)
                alike = min(len(own), len(others)) if alike is None else alike
                same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), None)
                if own != others:
                    assert alike * 512 <= (min(len(one), len(other)) if same is None else same) < alike * 512 + 40

    @pytest.mark.parametrize(
        ("first", "second", "seconds"),
        [
            ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.9951690", 4.314579),
            ("2024-05-10 00:00:00.009930+00:00", "2024-05-10T00:00:01Z", 0.99007),
            ("2024-02-28 23:59:59", "2024-03-01 00:00:00", 86_401),
            ("2024-05-10 02:00:00+02:00", "2024-05-10 00:00:30-0000", 30),
            ("1.5", "2", 0.5),
            ("0", "1e3", 1000),
        ],
    )
    def test_times(self, tmp_path: Path, first: str, second: str, seconds: float) -> None:
        work = traces.read(written(tmp_path, f"{AZURE}{first},1,1\n{second},1,1\n"))
        assert work.arrivals[1].at == pytest.approx(seconds, abs=1e-9)

    def test_other_columns_a_byte_order_mark_blank_lines_and_quotes(self, tmp_path: Path) -> None:
        text = "\ufeffuser, output_length ,input_length,timestamp,max_tokens\r\n\r\n"
        text += '"a, \nb",3,2,1000,\r\nc,4,5.0,0,900\r\n'
        a, b = traces.read(written(tmp_path, text)).arrivals
        assert (a.at, a.prompt_tokens, a.output_tokens, a.max_tokens) == (0.0, 5, 4, 900)
        assert (b.at, b.prompt_tokens, b.output_tokens, b.max_tokens) == (1.0, 2, 3, 256)

    @pytest.mark.parametrize(("output", "limit"), [(1, 256), (256, 256), (257, 512), (1000, 1024), (2049, 4096)])
    def test_the_assumed_limit(self, output: int, limit: int) -> None:
        assert traces.assumed_max_tokens(output) == limit


GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5}\n'


class TestWhatIsNone:
    """One sentence that names the file, the line, the column, and what would work."""

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("", ["is empty", "TIMESTAMP"]),
            ("\n \n", ["is empty"]),
            (AZURE, ["has no requests", "ContextTokens"]),
            ("a,b\n1,2\n", ["line 1", "'a', 'b'", "GeneratedTokens", "input_length"]),
            ("TIMESTAMP;ContextTokens;GeneratedTokens\n1;2;3\n", ["line 1", "would work"]),
            (AZURE + "0,1,1\n0,-5,1\n", ["line 3", "column ContextTokens", "'-5'", "from 1 to"]),
            (AZURE + "0,1,0\n", ["line 2", "column GeneratedTokens", "'0'"]),
            (AZURE + "0,1.5,1\n", ["column ContextTokens", "'1.5'"]),
            (AZURE + "0,99999999999999999999999,1\n", ["column ContextTokens"]),
            (AZURE + "0,,1\n", ["column ContextTokens: nothing"]),
            (AZURE + "0,1\n", ["line 2", "column GeneratedTokens", "ends before"]),
            (AZURE + "yesterday,1,1\n", ["column TIMESTAMP", "'yesterday'", "seconds", "2023-11-16"]),
            (AZURE + "2023-02-30 00:00:00,1,1\n", ["column TIMESTAMP"]),
            (AZURE + "-1,1,1\n", ["column TIMESTAMP", "from 0 on"]),
            (AZURE + "nan,1,1\n", ["column TIMESTAMP"]),
            (AZURE + "1e400,1,1\n", ["column TIMESTAMP"]),
            (AZURE + '0,"1,1\n', ["not CSV"]),
            (AZURE.encode() + b"0,1,1\n0,\xff,1\n", ["line 3", "not UTF-8", "byte 3", "0xff"]),
            (AZURE.encode("utf-16"), ["line 1", "not UTF-8"]),
            (GOOD + "{\n", ["line 2", "not JSON", "one object a line"]),
            ("[" + GOOD + "]", ["line 1", "not JSON"]),
            ("[1]", ["line 1", "not an object"]),
            ("[" * 100_000, ["line 1", "not JSON"]),
            ("{}", ["line 1", "nothing", "input_length"]),
            (GOOD + "{}", ["line 2", "column input_length: nothing"]),
            (GOOD + '{"input_length": true}', ["line 2", "column input_length: True"]),
            (GOOD.replace("0,", "NaN,", 1), ["line 1", "column timestamp", "milliseconds"]),
            (GOOD.replace("600", "9" * 5000), ["line 1"]),
            (GOOD.replace("}", ', "hash_ids": [1]}'), ["line 1", "column hash_ids", "there are 1", "need 2"]),
            (GOOD.replace("}", ', "hash_ids": [1, "x"]}'), ["column hash_ids", "whole numbers"]),
            (GOOD.replace("}", ', "max_tokens": 4}'), ["column max_tokens", "4 is less than the 5"]),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, list) else "",
    )
    def test_a_sentence(self, tmp_path: Path, content: str | bytes, words: list[str]) -> None:
        path = written(tmp_path, content)
        with pytest.raises(RequestError) as caught:
            traces.read(path)
        message = str(caught.value)
        assert str(path) in message
        assert len(message) < len(str(path)) + 400
        assert not [word for word in words if word not in message], message

    def test_files_that_are_not_there_or_are_folders(self, tmp_path: Path) -> None:
        for path in (tmp_path / "none.csv", tmp_path):
            with pytest.raises(RequestError, match="cannot be read"):
                traces.read(path)

    def test_a_line_without_end_is_not_read_into_memory(self, tmp_path: Path) -> None:
        path = tmp_path / "huge"
        with path.open("wb") as file:
            file.write(b"0")
            file.truncate(1 << 34)
        with pytest.raises(RequestError, match=r"line 1 is longer than 4,194,304 bytes"):
            traces.read(path)

    def test_too_many_requests(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(traces, "MAX_REQUESTS", 2)
        with pytest.raises(RequestError, match="more than 2 requests"):
            traces.read(written(tmp_path, GOOD * 3))

    @pytest.mark.parametrize("part", [{"limit": 0}, {"seconds": 0}, {"seconds": float("nan")}])
    def test_no_part_at_all(self, tmp_path: Path, part: dict[str, Any]) -> None:
        with pytest.raises(RequestError, match="must be"):
            traces.read(written(tmp_path, GOOD), **part)

    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.binary(max_size=200)
        | st.text(max_size=100).map(lambda text: (AZURE + text).encode("utf-8", "surrogatepass"))
        | st.lists(st.text('0123456789,.-+eE:"\n Z', max_size=30)).map(lambda rows: (AZURE + "\n".join(rows)).encode())
        | st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from([*MOONCAKE, "hash_ids", "max_tokens"]), inner)
            ),
        ).map(lambda value: (GOOD + json.dumps(value)).encode())
    )
    @example(b"\xef\xbb\xbf")
    @example(b"\x00")
    @example((AZURE + '0,1,1\r0,1,1\n"').encode())
    def test_garbage_is_never_a_traceback(self, tmp_path: Path, content: bytes) -> None:
        try:
            work = traces.read(written(tmp_path, content))
        except RequestError:
            return
        assert work.arrivals
        assert all(a.at >= 0 and a.prompt_tokens >= 1 and 1 <= a.output_tokens <= a.max_tokens for a in work.arrivals)


class TestAmbiguous:
    """What could be read in two ways is not read in either."""

    def test_a_column_twice(self, tmp_path: Path) -> None:
        path = written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n1,2,3,4\n")
        with pytest.raises(RequestError, match="line 1: there are 2 columns ContextTokens"):
            traces.read(path)

    def test_dates_among_seconds(self, tmp_path: Path) -> None:
        path = written(tmp_path, AZURE + "2023-11-16 18:15:46,2,3\n5,2,3\n6,2,3\n")
        with pytest.raises(RequestError, match="1 times as a date and 2 as a number"):
            traces.read(path)

    def test_a_file_name_that_is_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "caf\udce9.csv"
        path.write_text(AZURE + "5,2,3\n")
        work = traces.read(path)
        assert (work.name, work.source) == ("caf?", "caf?.csv")
