"""What the Store protocol promises, held against every implementation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from llmgw.cluster.model import NodeState, StoryLine
from llmgw.store.base import Change, Fenced, Saved, Store, StoreError
from llmgw.store.bounds import STORY_KEPT
from llmgw.store.codec import without_session

from .conftest import MakeStore
from .leading import lead
from .samples import certificate, drain, engine, event, key, node, replica, revocation, token

Write = Callable[[Store, int], Awaitable[object]]

WRITES: dict[str, Write] = {
    "commit": lambda store, epoch: store.commit(epoch, Change(nodes=[node("new")], events=[event(99)])),
    "a drain": lambda store, epoch: store.commit(epoch, Change(drains=[drain("new")])),
    "an undrain": lambda store, epoch: store.commit(epoch, Change(removed_drains=["old"])),
    "an engine": lambda store, epoch: store.commit(epoch, Change(engines=[engine("vllm")])),
    "renew": lambda store, epoch: store.renew(epoch, 60.0),
    "an empty commit": lambda store, epoch: store.commit(epoch, Change()),
    "a removal": lambda store, epoch: store.commit(epoch, Change(removed_nodes=["old"], removed_replicas=["m-aaaaa"])),
    "set_scale": lambda store, epoch: store.set_scale(epoch, "m", 5, 1),
    "set_scale back": lambda store, epoch: store.set_scale(epoch, "old", None, 1),
    "put_key": lambda store, epoch: store.put_key(epoch, key("key-new")),
    "a certificate": lambda store, epoch: store.commit(epoch, Change(certificates=[certificate("ff", "new")])),
    "a token": lambda store, epoch: store.commit(epoch, Change(tokens=[token("new")])),
    "a claim": lambda store, epoch: store.claim_token(epoch, token("old", used_key="k"), Change(nodes=[node("new")])),
    "a revocation": lambda store, epoch: store.commit(epoch, Change(revocations=[revocation("new")])),
    "set_admin_token": lambda store, epoch: store.set_admin_token(epoch, "cd" * 32),
}


async def test_a_new_store_is_empty_but_for_its_secret(store: Store) -> None:
    saved = await store.load()
    assert len(saved.secret) >= 32
    assert saved == Saved(secret=saved.secret)
    assert await store.events() == []


async def test_each_store_has_a_secret_of_its_own(make_store: MakeStore) -> None:
    first, second = await make_store(), await make_store()
    assert (await first.load()).secret != (await second.load()).secret


async def test_each_lead_is_higher_than_the_one_before(store: Store) -> None:
    epochs = [await lead(store, holder) for holder in ("a", "b", "b", "a")]
    assert epochs == sorted(set(epochs))
    assert epochs[0] >= 1


async def test_a_step_comes_back_as_it_was_written(store: Store) -> None:
    epoch = await lead(store, "a")
    nodes = (node("n1"), node("n2", state=NodeState.DRAINING, why="asked to drain", inventory=None))
    replicas = (replica("m-aaaaa"), replica("m-bbbbb", placements=(), last_exit=None))
    drains = (drain("n1"), drain("n2", moves=()))
    engines = (engine(), engine("vllm", previous=None, rolled_back="", older=()))
    step = Change(
        nodes=nodes, replicas=replicas, drains=drains, engines=engines, replicas_made={"m": 2}, events=[event(1)]
    )
    await store.commit(epoch, step)
    saved = await store.load()
    assert saved.drains == drains
    assert saved.engines == engines
    assert saved.nodes == tuple(without_session(node) for node in nodes)
    assert saved.replicas == replicas
    assert saved.replicas_made == {"m": 2}
    assert await store.events() == [event(1)]


async def test_a_node_comes_back_without_its_session(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(nodes=[node(session=7, heard_at_s=5.0)]))
    (saved,) = (await store.load()).nodes
    assert (saved.session, saved.vitals, saved.heard_at_s, saved.shards) == (None, None, 0.0, ())
    assert saved.engines == node().engines
    assert saved.inventory == node().inventory


async def test_the_last_write_of_a_thing_counts(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(nodes=[node(why="first")], replicas=[replica(generation=1)]))
    await store.commit(epoch, Change(nodes=[node(why="second")], replicas=[replica(generation=2)]))
    saved = await store.load()
    assert [node.why for node in saved.nodes] == ["second"]
    assert [replica.generation for replica in saved.replicas] == [2]


async def test_all_comes_back_in_order_of_id(store: Store) -> None:
    epoch = await lead(store, "a")
    for id in ("n2", "n10", "n1"):
        await store.commit(epoch, Change(nodes=[node(id)], replicas=[replica(id)]))
        await store.put_key(epoch, key(id))
    saved = await store.load()
    for things in (saved.nodes, saved.replicas, saved.keys):
        assert [thing.id for thing in things] == ["n1", "n10", "n2"]


async def test_removed_things_are_gone_and_removing_them_again_is_no_error(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(nodes=[node("n1"), node("n2")], replicas=[replica("m-aaaaa"), replica("m-bbbbb")]))
    for _ in range(2):
        await store.commit(epoch, Change(removed_nodes=["n1"], removed_replicas=["m-aaaaa"]))
    saved = await store.load()
    assert [node.id for node in saved.nodes] == ["n2"]
    assert [replica.id for replica in saved.replicas] == ["m-bbbbb"]


async def test_what_is_both_written_and_removed_is_removed(store: Store) -> None:
    epoch = await lead(store, "a")
    change = Change(
        nodes=[node("n1")], removed_nodes=["n1"], replicas=[replica("m-aaaaa")], removed_replicas=["m-aaaaa"]
    )
    await store.commit(epoch, change)
    saved = await store.load()
    assert (saved.nodes, saved.replicas) == ((), ())


async def test_the_count_of_replicas_made_never_falls(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(replicas_made={"m": 5, "other": 1}))
    await store.commit(epoch, Change(replicas_made={"m": 3}, removed_replicas=["m-aaaaa"]))
    assert (await store.load()).replicas_made == {"m": 5, "other": 1}


async def test_a_story_keeps_its_last_lines(store: Store) -> None:
    epoch = await lead(store, "a")
    story = tuple(StoryLine(at=float(i), generation=1, state="failed", why=str(i)) for i in range(STORY_KEPT + 50))
    await store.commit(epoch, Change(replicas=[replica(story=story)]))
    (saved,) = (await store.load()).replicas
    assert saved.story == story[50:]


async def test_scale_is_an_override_that_can_be_taken_back(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.set_scale(epoch, "m", 3, 1)
    await store.set_scale(epoch, "other", 0, 2)
    await store.set_scale(epoch, "m", 4, 2)
    saved = await store.load()
    assert (saved.scale, saved.scale_base) == ({"m": 4, "other": 0}, {"m": 2, "other": 2})
    await store.set_scale(epoch, "m", None, 2)
    await store.set_scale(epoch, "never-scaled", None, 1)
    saved = await store.load()
    assert (saved.scale, saved.scale_base) == ({"other": 0}, {"other": 2})


async def test_a_key_is_added_and_revoked(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.put_key(epoch, key())
    await store.put_key(epoch, key(revoked_at=9.5))
    assert (await store.load()).keys == (key(revoked_at=9.5),)


async def test_a_serial_stays_with_the_node_it_was_entered_for(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(certificates=[certificate("0a", "n1")]))
    await store.commit(epoch, Change(certificates=[certificate("0a", "n2"), certificate("0b", "n1")]))
    await store.commit(epoch, Change(certificates=[certificate("0b", "n1", state="revoked", why="stolen")]))
    assert (await store.load()).certificates == (
        certificate("0a", "n1"),
        certificate("0b", "n1", state="revoked", why="stolen"),
    )


async def test_identities_come_back_as_they_were_written_and_go(store: Store) -> None:
    epoch = await lead(store, "a")
    used = token("b", used_key="k", used_at=3.0, used_from="10.0.0.9:1", answer="PEM", replace=True)
    revoked = (revocation("n1", removed=True), revocation("0c", kind="serial"))
    await store.commit(epoch, Change(certificates=[certificate()], tokens=[token("a"), used], revocations=revoked))
    saved = await store.load()
    assert (saved.certificates, saved.tokens, saved.revocations) == ((certificate(),), (token("a"), used), revoked)
    gone = Change(removed_certificates=["0a"], removed_tokens=["a", "b"], removed_revocations=["node:n1", "serial:0c"])
    for _ in range(2):
        await store.commit(epoch, gone)
    saved = await store.load()
    assert (saved.certificates, saved.tokens, saved.revocations) == ((), (), ())


async def test_of_two_keys_that_claim_a_token_at_once_one_gets_it(store: Store) -> None:
    epoch = await lead(store, "a")
    for number in range(20):
        id = f"t{number}"
        await store.commit(epoch, Change(tokens=[token(id)]))
        claims = [
            store.claim_token(
                epoch, token(id, used_key=key, answer=key), Change(certificates=[certificate(f"{number}{key}", "n1")])
            )
            for key in "abc"
        ]
        won = await asyncio.gather(*claims)
        assert won.count(True) == 1
        winner = "abc"[won.index(True)]
        saved = await store.load()
        assert [each.answer for each in saved.tokens if each.id == id] == [winner]
        assert [each.serial for each in saved.certificates if each.serial[:-1] == str(number)] == [f"{number}{winner}"]


async def test_a_token_is_claimed_again_by_the_same_key_alone(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(tokens=[token("t")]))
    assert await store.claim_token(epoch, token("t", used_key="k", answer="1"), Change())
    assert await store.claim_token(epoch, token("t", used_key="k", answer="2"), Change(events=[event(1)]))
    assert not await store.claim_token(epoch, token("t", used_key="other"), Change(events=[event(2)]))
    assert not await store.claim_token(epoch, token("none", used_key="k"), Change(events=[event(3)]))
    assert (await store.load()).tokens == (token("t", used_key="k", answer="2"),)
    assert await store.events() == [event(1)]


async def test_the_admin_token_is_the_last_one_set(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.set_admin_token(epoch, "first")
    await store.set_admin_token(epoch, "second")
    assert (await store.load()).admin_token_hash == "second"


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
async def test_a_deposed_leader_writes_nothing_at_all(store: Store, write: Write) -> None:
    deposed = await lead(store, "old-leader")
    await store.commit(deposed, Change(nodes=[node("old")], replicas=[replica("m-aaaaa")], events=[event(1)]))
    await store.commit(deposed, Change(drains=[drain("old")], tokens=[token("old")]))
    await store.set_scale(deposed, "old", 2, 1)
    leader = await lead(store, "new-leader")
    before, events = await store.load(), await store.events()
    with pytest.raises(Fenced, match=rf"epoch {deposed} .*nothing was written: 'new-leader' leads with epoch {leader}"):
        await write(store, deposed)
    assert await store.load() == before
    assert await store.events() == events
    await write(store, leader)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
async def test_nobody_writes_before_somebody_leads(store: Store, write: Write) -> None:
    for epoch in (0, -1, 1):
        with pytest.raises(Fenced, match="nobody leads yet"):
            await write(store, epoch)
    assert (await store.load()).nodes == ()


async def test_an_epoch_that_is_not_given_out_yet_is_refused(store: Store) -> None:
    epoch = await lead(store, "a")
    with pytest.raises(Fenced):
        await store.commit(epoch + 1, Change(nodes=[node()]))


BAD = {
    "a time that is no number": Change(nodes=[node("good")], replicas=[replica(since=math.nan)]),
    "text that is not Unicode": Change(nodes=[node("good")], events=[event(1, words="\ud800")]),
    "a state that there is not": Change(replicas=[replica("m-aaaaa")], nodes=[node(state="asleep")]),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
async def test_a_step_that_could_not_be_read_back_is_refused_whole(store: Store, bad: Change) -> None:
    epoch = await lead(store, "a")
    before = await store.load()
    with pytest.raises(StoreError, match="nothing of this step was written"):
        await store.commit(epoch, bad)
    assert await store.load() == before
    assert await store.events() == []


async def test_a_step_written_twice_is_written_once(store: Store) -> None:
    epoch = await lead(store, "a")
    step = Change(nodes=[node()], replicas=[replica()], replicas_made={"m": 1}, events=[event(1), event(2)])
    await store.commit(epoch, step)
    once = await store.load()
    await store.commit(epoch, replace(step, events=[event(1, words="said anew"), event(2)]))
    assert await store.load() == once
    assert await store.events() == [event(1), event(2)]


async def test_without_after_events_are_the_newest_in_order_of_time(store: Store) -> None:
    epoch = await lead(store, "a")
    for number in (3, 1, 2):
        await store.commit(epoch, Change(events=[event(number)]))
    assert await store.events() == [event(1), event(2), event(3)]
    assert await store.events(limit=2) == [event(2), event(3)]


async def test_with_after_events_are_the_first_that_follow(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(events=[event(number) for number in range(1, 6)]))
    assert await store.events(after=event(2).id, limit=2) == [event(3), event(4)]
    assert await store.events(after=event(5).id) == []
    assert await store.events(after="") == [event(number) for number in range(1, 6)]


async def test_events_of_one_subject(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(events=[event(1, "a"), event(2, "b"), event(3, "a"), event(4, ""), event(5, "a")]))
    assert await store.events(subject="a", limit=2) == [event(3, "a"), event(5, "a")]
    assert await store.events(subject="a", after=event(1).id, limit=1) == [event(3, "a")]
    assert await store.events(subject="") == [event(4, "")]
    assert await store.events(subject="nobody") == []


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_limit_below_one_gives_no_events(store: Store, limit: int) -> None:
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(events=[event(1)]))
    assert await store.events(limit=limit) == []
    assert await store.events(limit=limit, after="") == []


async def test_events_stay_within_their_bound_and_the_newest_are_kept(make_store: MakeStore) -> None:
    store = await make_store(events_kept=50, prune_every=10)
    epoch = await lead(store, "a")
    for number in range(0, 200, 2):
        await store.commit(epoch, Change(events=[event(number), event(number + 1)]))
        assert len(await store.events(limit=1000)) <= 60
    assert await store.events(limit=50) == [event(number) for number in range(150, 200)]


async def test_commits_at_once_are_all_written(store: Store) -> None:
    epoch = await lead(store, "a")
    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(store.commit(epoch, Change(nodes=[node(f"n{number:02}")], events=[event(number)])))
    assert len((await store.load()).nodes) == 40
    assert await store.events() == [event(number) for number in range(40)]


async def test_a_cancelled_commit_is_whole_or_not_there_and_the_store_goes_on(store: Store) -> None:
    epoch = await lead(store, "a")
    for number in range(30):
        step = Change(nodes=[node(f"n{number:02}")], replicas=[replica(f"r{number:02}")], events=[event(number)])
        commit = asyncio.ensure_future(store.commit(epoch, step))
        for _ in range(number % 5):
            await asyncio.sleep(0)
        commit.cancel()
        await asyncio.wait([commit])
    await store.commit(epoch, Change(nodes=[node("n99")], replicas=[replica("r99")], events=[event(99)]))
    saved = await store.load()
    written = [node.id[1:] for node in saved.nodes]
    assert written[-1] == "99"
    assert [replica.id[1:] for replica in saved.replicas] == written
    assert [f"{int(event.id):02}" for event in await store.events()] == written


async def test_what_is_given_out_is_not_what_is_inside(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(replicas_made={"m": 1}, events=[event(1)]))
    (await store.load()).replicas_made["m"] = 99
    (await store.events())[0].data["n"] = "changed"
    assert (await store.load()).replicas_made == {"m": 1}
    assert await store.events() == [event(1)]


async def test_a_closed_store_refuses_in_words(store: Store) -> None:
    epoch = await lead(store, "a")
    await store.close()
    await store.close()
    for call in (store.load(), store.events(), lead(store, "b"), store.commit(epoch, Change()), store.backup("/x")):
        with pytest.raises(StoreError, match="closed"):
            await call
