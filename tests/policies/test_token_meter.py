from __future__ import annotations

from moe_lora.policies.routing import TokenMeter


def test_tokens_are_counted_by_adapter_until_they_are_taken():
    meter = TokenMeter()
    for adapter, tokens in (("a", 3), (None, 9), ("b", 1), ("a", 2)):
        meter.add(adapter, tokens)
    assert meter.take() == {"a": 5, "b": 1}
    assert meter.take() == {}
