"""Which hosts a job gets, and what runs where."""

from __future__ import annotations

import pytest

from tfps.errors import ConfigError
from tfps.launch.hosts import Host, Placement, has_only_ipv6, parse_hosts


def test_hosts_have_their_numbers_of_workers_by_default_one() -> None:
    assert parse_hosts("a:4, b.example.org,10.0.0.4:2") == (Host("a", 4), Host("b.example.org", 1), Host("10.0.0.4", 2))


def test_an_ipv6_address_keeps_its_brackets() -> None:
    assert parse_hosts("[fd00::1]:2,[fe80::1%eth0]") == (Host("[fd00::1]", 2), Host("[fe80::1%eth0]", 1))


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:x", "a:-1", "-oProxyCommand=x", "fd00::1", "a b", "root@a"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--hosts must be HOST:WORKERS, separated by commas"):
        parse_hosts(text)


def test_a_host_that_no_resolver_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a host must be a name or an IP address, got 'a\.\.b' in --hosts: "):
        parse_hosts("a..b:2,c")


def test_a_host_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"each host must be named once, got a 2 times; write a:N"):
        parse_hosts("a,b,a")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
def test_among_several_hosts_none_is_called_as_each_calls_itself(name: str) -> None:
    with pytest.raises(ConfigError, match="is another machine on each host"):
        parse_hosts(f"{name}:2,b:2")
    assert parse_hosts(f"{name}:2") == (Host(name, 2),)


def test_ranks_of_a_host_are_neighbors() -> None:
    placement = Placement.of([Host("a", 2), Host("b", 1)], pservers_per_host=2)
    assert placement == Placement(("a", "a", "b"), ("a", "a", "b", "b"))
    assert [placement.neighbors(rank) for rank in range(3)] == [(0, 2), (1, 2), (0, 1)]


def test_only_what_is_known_to_have_ipv6_alone_counts_as_such() -> None:
    assert [has_only_ipv6(name) for name in ("[fd00::1]", "[::1]", "127.0.0.1", "no-such-host.invalid")] == [
        True,
        True,
        False,
        False,
    ]
