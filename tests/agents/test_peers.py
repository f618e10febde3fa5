"""Links to peers: measured, shaped, and known to be broken at once."""

from __future__ import annotations

import asyncio
import time
from random import Random

import numpy as np
import pytest

from agents.identity import Identity
from agents.messages import Address, Done, GetCa, Probe, ShapeLink
from agents.peers import LinkMeter, PeerPool, PeerSettings
from agents.shaping import LinkShaper
from agents.wire import serve
from sla.errors import AgentLostError, InvalidInputError, RefusedError


def test_the_meter_smooths_round_trips_and_takes_the_usual_one_off_bulk_probes():
    meter = LinkMeter()
    assert meter.rtt_ms is None
    for ms in (10.0, 10.0, 20.0):
        meter.round_trip(ms)
    assert meter.rtt_ms == 10.0, "late once is not slow"
    assert meter.jitter_ms == pytest.approx(np.std([10, 10, 20]))
    assert meter.bandwidth_bytes_per_s == 0.0
    meter.bulk(1_000_000, 110.0)
    assert meter.bandwidth_bytes_per_s == pytest.approx(1e7)
    for _ in range(5):
        meter.round_trip(40.0)
    assert meter.rtt_ms == 40.0
    meter = LinkMeter()
    meter.bulk(1 << 40, 0.0)
    assert meter.bandwidth_bytes_per_s == 12.5e9


def test_one_odd_bulk_probe_is_asked_again_and_two_say_that_the_link_changed():
    meter = LinkMeter()
    for _ in range(5):
        meter.bulk(1_000_000, 100.0)
    meter.bulk(1_000_000, 900.0)
    assert meter.odd is not None
    assert meter.bandwidth_bytes_per_s == pytest.approx(1e7)
    meter.bulk(1_000_000, 100.0)
    assert meter.odd is None
    assert meter.bandwidth_bytes_per_s == pytest.approx(1e7), "it was chance"
    for _ in range(2):
        meter.bulk(1_000_000, 500.0)
    assert meter.bandwidth_bytes_per_s == pytest.approx(2e6)
    for _ in range(2):
        meter.bulk(1_000_000, 20.0)
    assert meter.bandwidth_bytes_per_s == pytest.approx(5e7), "a link that recovers is believed as quickly"


@pytest.mark.parametrize(("delay_ms", "jitter_ms", "mbps"), [(4, 0.5, 200), (15, 2, 100), (25, 4, 150), (50, 10, 40)])
def test_the_bandwidth_of_a_shaped_link_is_found_in_spite_of_its_jitter(delay_ms, jitter_ms, mbps):
    """Ten minutes of probes over a shaped link, by its own arithmetic; nothing sleeps."""
    there, back = (LinkShaper(delay_ms, jitter_ms, mbps * 125e3, Random(seed)) for seed in (1, 2))
    meter, now_s, found = LinkMeter(), 100.0, []

    def probed_ms(n_bytes: int) -> float:
        return 1000.0 * (back.release_at_s(64, there.release_at_s(n_bytes, now_s)) - now_s)

    for at in range(1200):
        now_s += 0.5
        meter.round_trip(probed_ms(64))
        if at % 10 == 9 or meter.odd is not None:
            now_s += 0.25
            n_bytes = meter.bulk_bytes(128 << 10, 1 << 20)
            meter.bulk(n_bytes, probed_ms(n_bytes))
            found.append(meter.bandwidth_bytes_per_s / (mbps * 125e3))
    assert np.median(found) == pytest.approx(1.0, abs=0.05)
    assert np.quantile(np.abs(np.log(found[6:])), 0.9) < 0.2


def test_bulk_probes_carry_what_tells_bytes_from_jitter_and_never_take_the_link():
    meter = LinkMeter()
    assert meter.bulk_bytes(1000, 10**6) == 1000, "nothing is known yet"
    for ms in (10.0, 30.0) * 5:
        meter.round_trip(ms)
    meter.bulk(1000, 20.0 + 1.0)
    assert meter.bulk_bytes(1000, 10**6) == pytest.approx(1e6 * 5 * 0.01, rel=0.01)
    assert meter.bulk_bytes(1000, 20_000) == 20_000
    for ms in (10.0, 1010.0) * 10:
        meter.round_trip(ms)
    assert meter.bulk_bytes(1000, 10**6) == pytest.approx(1e6 * 0.25, rel=0.01)


async def test_watched_peers_are_probed_and_reported(fleet, until):
    one, two = await fleet.start("one"), await fleet.start("two")
    one.peers.watch({one.id: one.address, two.id: two.address})
    await until(lambda: len(one.peers.reports()) == 1)
    (report,) = one.peers.reports()
    assert (report.peer, report.broken, report.rtt_ms > 0) == ("two", False, True)
    one.peers.watch({})
    assert one.peers.reports() == ()


async def test_a_peer_that_goes_is_broken_until_it_is_back(fleet, until):
    one, two = await fleet.start("one"), await fleet.start("two")
    one.peers.watch({two.id: two.address})
    await until(lambda: bool(one.peers.reports()))
    await fleet.kill(two)
    await until(lambda: one.peers.is_broken("two"))
    assert one.peers.reports()[0].broken
    with pytest.raises(AgentLostError):
        await one.peers.call(two.id, Address("127.0.0.1", 1), Probe(), {}, timeout_s=1)
    again = await fleet.start("two")
    one.peers.watch({two.id: again.address})
    await until(lambda: not one.peers.is_broken("two") and not one.peers.reports()[0].broken)
    answer, _ = await one.peers.call(two.id, again.address, Probe(), {}, timeout_s=5)
    assert isinstance(answer, Done)


async def test_somebody_else_at_a_peers_address_is_not_believed(fleet):
    one, two = await fleet.start("one"), await fleet.start("two")
    with pytest.raises(AgentLostError, match="not three"):
        await one.peers.call("three", two.address, Probe(), {}, timeout_s=5)


async def test_a_peer_that_is_not_there_is_not_dialled_again_at_once(fleet):
    one = await fleet.start("one")
    nowhere = Address("127.0.0.1", 1)
    with pytest.raises(AgentLostError, match="cannot be reached"):
        await one.peers.call("two", nowhere, Probe(), {}, timeout_s=5)
    assert one.peers.is_broken("two")
    with pytest.raises(AgentLostError, match="is tried again"):
        await one.peers.call("two", nowhere, Probe(), {}, timeout_s=5)


async def test_shaping_holds_in_both_directions_of_a_connection(fleet):
    one, two = await fleet.start("one", emulated=True), await fleet.start("two")

    async def round_trip_ms(device, peer) -> float:
        began_s = time.perf_counter()
        await device.peers.call(peer.id, peer.address, Probe(), {}, timeout_s=10)
        return (time.perf_counter() - began_s) * 1000

    await round_trip_ms(one, two)
    await round_trip_ms(two, one)
    one.peers.shape(ShapeLink(peer=two.id, delay_ms=60))
    assert await round_trip_ms(one, two) >= 60
    assert await round_trip_ms(two, one) >= 60
    one.peers.shape(ShapeLink(peer=None))
    assert one.peers._shaper(two.id) is None


async def test_what_shaping_does_not_take(fleet):
    one, two = await fleet.start("one", emulated=True), await fleet.start("two")
    with pytest.raises(RefusedError, match="real"):
        two.peers.shape(ShapeLink(peer=None, delay_ms=1))
    for bad in (ShapeLink(peer=None, delay_ms=-1), ShapeLink(peer=None, jitter_ms=float("nan"))):
        with pytest.raises(InvalidInputError, match="within a minute"):
            one.peers.shape(bad)
    with pytest.raises(InvalidInputError, match="at least 1000"):
        one.peers.shape(ShapeLink(peer=None, bandwidth_bytes_per_s=0.0))


async def test_a_peer_that_hangs_is_broken_until_it_answers_again(ca, tmp_path, until):
    identity = Identity(tmp_path / "two")
    identity.save_certificate(ca.sign_agent(identity.csr_pem(), "two", now_s=time.time()), ca.ca_pem)
    awake, chains = asyncio.Event(), asyncio.Event()
    awake.set()

    async def hang(connection, message, tensors):
        if not isinstance(message, Probe):
            chains.set()
            await asyncio.Event().wait()
        await awake.wait()
        return Done(), {}

    context = identity.client_context()
    async with await serve(hang, "127.0.0.1", 0, identity.server_context()) as server:
        peers = PeerPool("one", lambda: context, settings=PeerSettings(probe_every_s=0.02, silence_s=0.2))
        address = Address("127.0.0.1", server.port)
        peers.watch({"two": address})
        await until(lambda: bool(peers.reports()))
        waiting = asyncio.create_task(peers.call("two", address, GetCa(), {}, timeout_s=60))
        await chains.wait()
        awake.clear()
        with pytest.raises(AgentLostError):  # told when the probes say so, long before its own time is over
            await waiting
        assert peers.is_broken("two")
        awake.set()
        await until(lambda: not peers.is_broken("two"))
        await peers.close()
