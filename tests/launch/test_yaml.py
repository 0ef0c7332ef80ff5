"""YAML that `launch` writes is read back as what it was made of."""

from __future__ import annotations

import pytest

from shardwise.launch.yaml import to_yaml

TEXTS = ["a\nb", "a\nb\n", "a\nb\n\n\n", "  indented first\nb\n", "\n  a\nb", "a: 1\n# no comment\n- b", "\ta\nb"]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_several_lines_come_back(text: str) -> None:
    yaml = pytest.importorskip("yaml", reason="the reader is PyYAML's")
    value = {"one": text, "list": [text, {"first": text, "then": 1}], "deep": {"er": [[text]]}}
    assert yaml.safe_load(to_yaml(value)) == value
