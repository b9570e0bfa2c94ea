"""docs/expert-cache.md against the source of the change: reasons, settings, fields and counters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/expert-cache.md").read_text()
SOURCE = {f.name: f.read_text() for f in sorted((ROOT / "patches/expert-cache/new").rglob("*expert-cache*.cpp"))}
SOURCE |= {f.name: f.read_text() for f in sorted((ROOT / "patches").glob("*/new/src/llama-expert-*.cpp"))}
CODE = "\n".join(SOURCE.values())
TEXT = r'"((?:[^"\\]|\\.)*)"'


def literals(pattern: str) -> set[str]:
    return {text.replace('\\"', '"') for text in re.findall(pattern, CODE)}


def reasons() -> set[str]:
    """All that the log and /props may say instead of serving."""
    found = literals(rf"why = (?:std::string\()?{TEXT}") | literals(rf"turn_off\((?:std::string\()?{TEXT}")
    found |= literals(rf"why = cpu \? {TEXT}") | literals(rf'why = cpu \? "[^"]*" : {TEXT}')
    found |= literals(rf"\+ {TEXT};\n\s+return false;")  # behind a device's name
    found |= literals(rf"turn_off\(refused\.empty\(\) \? {TEXT}") | literals(rf"runtime_error\(std::string\({TEXT}")
    found |= literals(rf"(?:drop\(.*|\n\s+)format\({TEXT}, (?:ggml_backend_dev_name|params)")
    found |= literals(rf"warmup \? {TEXT}") | literals(rf'warmup \? "[^"]*" : {TEXT}')
    found |= literals(r'status\\": \\"off\\", \\"reason\\": \\"((?:[^"\\])*)\\"')
    found |= literals(rf"return format\({TEXT}")
    return {text.strip() for text in found if text.strip()}


def shape(text: str) -> str:
    """Without what is filled in."""
    text = re.sub(r"%\w+", "*", text)
    return re.sub(r"\b(?:DEVICE|TYPE|NAME|VALUE|N|M)\b", "*", text).strip("* ")


def test_enough_reasons_are_found() -> None:
    assert len(reasons()) >= 22


@pytest.mark.parametrize("reason", sorted(reasons()))
def test_each_reason_is_explained(reason: str) -> None:
    explained = {
        shape(text) for line in PAGE.splitlines() if line.startswith("|") for text in re.findall(r"`([^`]+)`", line)
    }
    assert any(shape(reason) in text for text in explained), reason


def test_each_setting_is_explained_and_none_that_is_not_there() -> None:
    read = set(re.findall(r'"(LLAMA_MOE_CACHE_\w+)"', CODE))
    assert len(read) > 12
    told = set(re.findall(r"\| `(LLAMA_MOE_CACHE_\w+)` \|", PAGE))
    assert read == told


def test_the_fields_of_props_and_the_counters() -> None:
    stats = SOURCE["llama-expert-stats.cpp"]
    fields = set(re.findall(r'\\"(\w+)\\": ', stats)) - {"layer", "experts"}  # the table of layers is for test programs
    assert {"status", "hits", "skips"} <= fields
    assert [name for name in sorted(fields) if f"`{name}`" not in PAGE and f"`{name}[]`" not in PAGE] == []
    counters = re.findall(r'\{ "(\w+)",\s+"[^"]+",\s+c\.\w+ \}', SOURCE["expert-cache.cpp"])
    assert len(counters) == 8
    assert [name for name in counters if f"moe_cache_{name}_total" not in PAGE] == []
