"""The address of rank 0 as ranks hand it on: what is none is told, not a decoder's error."""

from __future__ import annotations

import pytest

from shardwise.ranks.meet import Address


def test_an_address_is_read_back_and_anything_else_is_a_value_error() -> None:
    address = Address(("127.0.0.1", "::1"), 4711, "token")
    assert Address.unpack(address.pack()) == address
    for word in ("", "AAAA", "no base64!", address.pack()[:8]):
        with pytest.raises(ValueError):
            Address.unpack(word)
