"""Addresses that nobody can dial never travel further."""

import pytest

from p2p_diloco.errors import ConfigError
from p2p_diloco.wire.addresses import announced, is_dialable, join_address, split_address
from p2p_diloco.wire.runid import parse_run_id, show_run_id


@pytest.mark.parametrize(
    "address", ["0.0.0.0:0", "0.0.0.0:5", "[::]:5", "127.0.0.1:0", "224.0.0.1:5", "x", "a b:1", ":1"]
)
def test_an_address_that_nobody_can_dial_is_known_as_such(address: str) -> None:
    assert not is_dialable(address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:65535", "example.org:443", "8.8.8.8:80"])
def test_a_reachable_address_is_accepted(address: str) -> None:
    assert is_dialable(address)
    assert join_address(*split_address(address)) == address


def test_an_unspecified_host_is_replaced_by_the_observed_one_and_port_zero_is_dropped() -> None:
    assert announced(("0.0.0.0:7000", "0.0.0.0:0", "10.0.0.1:5"), "192.0.2.7") == (
        "192.0.2.7:7000",
        "10.0.0.1:5",
    )
    assert announced(("[::]:7000",), "2001:db8::1") == ("[2001:db8::1]:7000",)
    assert announced(("nonsense", "0.0.0.0:0"), "192.0.2.7") == ()


def test_a_run_id_reads_back_as_it_was_shown() -> None:
    run_id = bytes(range(32))
    assert parse_run_id(show_run_id(run_id)) == run_id
    for wrong in ("", "abc", "0" * 52, show_run_id(run_id)[:-4]):
        with pytest.raises(ConfigError, match="run_id"):
            parse_run_id(wrong)
