"""Client and server over real mutual TLS on loopback."""

from __future__ import annotations

import asyncio

from llmgw.link.messages import Desired, Observed, Welcome

from .ends import VITALS


async def test_a_node_is_welcomed_and_both_ways_carry_frames(serve, dial):
    server, told = await serve(servers=("https://127.0.0.1:1",), epoch=7)
    end = dial(server.port, "a")
    state = await end.connected()
    assert (state.epoch, state.session, state.server) == (7, 1, f"https://127.0.0.1:{server.port}")
    welcome = await end.frame(Welcome)
    assert (welcome.cluster, welcome.servers) == ("lab", ("https://127.0.0.1:1",))

    ((peer,),) = await told.wait("welcomed")
    assert (peer.id, peer.role, peer.session, peer.hello.fingerprint) == ("a", "node", 1, "machine-of-a")
    assert server.peer("a", "node") is peer

    peer.send(Desired(epoch=7, session=1, revision=3))
    assert (await end.frame(Desired)).revision == 3
    end.client.send(Observed(epoch=0, session=0, revision=3, weights=("w",)))
    ((of, frame),) = await told.wait("frame")
    assert of is peer
    assert frame == Observed(epoch=7, session=1, revision=3, weights=("w",))
    beats = await told.wait("heartbeat", 2)
    assert beats[0][1].vitals == VITALS


async def test_a_stopped_client_sends_what_was_queued_and_says_goodbye(serve, dial):
    server, told = await serve()
    end = dial(server.port, "a")
    await end.connected()
    end.client.send(Observed(epoch=0, session=0, weights=("last",)))
    await asyncio.to_thread(end.client.stop)
    ((_, why),) = await told.wait("closed")
    assert why == "it closed the connection: stopped"
    assert told.of("frame")[0][1].weights == ("last",)
    assert server.peer("a", "node") is None
    assert end.client.state.words == "stopped"
