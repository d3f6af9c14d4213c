"""JSON of others: every fault is a ValueError, and no more than the bound is read."""

import json

import pytest

from recipe import bounded


def test_json_is_read_as_json_reads_it(tmp_path):
    value = {"a": [1, 2.5, None, True, "ä"], "b": {}}
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert bounded.read_json(tmp_path / "a.json") == bounded.parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, b"[" * 200_000, b"\xff\xfe[\0]\0", "", "[1", "nul"])
def test_what_is_no_json_or_nested_too_deeply_is_a_value_error(text, tmp_path):
    with pytest.raises(ValueError):
        bounded.parse_json(text)
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError):
        bounded.read_json(path)


def test_a_larger_file_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "MOST_BYTES", 100)
    path = tmp_path / "a.json"
    path.write_text(json.dumps("x" * 98))
    assert len(bounded.read_json(path)) == 98
    path.write_text(json.dumps("x" * 99))
    with pytest.raises(ValueError, match="101 bytes of JSON, more than 100"):
        bounded.read_json(path)
