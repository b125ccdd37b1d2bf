"""The queue, compared with a simple model that keeps everything and sorts each time."""

from __future__ import annotations

from collections import defaultdict

import pytest
from effort import examples
from engine_without_model import make_request, make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.core.fairness.fair_queue import FairQueue
from paged_backend.core.fairness.tenant_queue import MAX_DEBTORS

WEIGHTS = {"b": 4.0, "c": 0.5}


class NaiveQueue:
    """What the policy says, with nothing forgotten as long as anything is open."""

    def __init__(self, fair):
        self.fair = fair
        self.counters = defaultdict(float)  # (priority, tenant) -> served, by weight
        self.last = {}  # priority -> account that ceased to wait last
        self.waiting = {}
        self.open = {}

    def account(self, seq):
        return seq.request.priority, seq.request.tenant if self.fair else ""

    def of(self, account):
        return [seq for seq in self.waiting.values() if self.account(seq) == account]

    def begin(self, seq):
        self.open[seq.seq_id] = seq
        self.wait(seq)

    def wait(self, seq):
        priority, _ = account = self.account(seq)
        if not self.of(account):
            others = [
                self.counters[self.account(other)]
                for other in self.waiting.values()
                if other.request.priority == priority
            ]
            last = self.counters[self.last[priority]] if priority in self.last else 0.0
            self.counters[account] = max(self.counters[account], min(others, default=last))
        self.waiting[seq.seq_id] = seq

    def leave(self, seq):
        if self.waiting.pop(seq.seq_id, None) is not None and not self.of(self.account(seq)):
            self.last[seq.request.priority] = self.account(seq)

    def end(self, seq):
        self.leave(seq)
        del self.open[seq.seq_id]
        priority = seq.request.priority
        if all(other.request.priority != priority for other in self.open.values()):
            self.last.pop(priority, None)
            for account in [account for account in self.counters if account[0] == priority]:
                del self.counters[account]

    def serve(self, seq, cost):
        account = self.account(seq)
        self.counters[account] += cost / (WEIGHTS.get(account[1], 1.0))

    def first(self):
        def key(seq):
            account = self.account(seq)
            eldest = min(other.seq_id for other in self.of(account))
            return account[0], self.counters[account], eldest, seq.seq_id

        return min(self.waiting.values(), key=key)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from("aabcd"), st.sampled_from([0, 0, 0, -1, 1])),
        st.tuples(st.just("admit"), st.just(0), st.just(0)),
        st.tuples(st.just("serve"), st.integers(0, 20), st.integers(1, 9)),
        st.tuples(st.just("end"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("preempt"), st.integers(0, 20), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=examples(200), deadline=None)
@given(actions=actions, fair=st.booleans())
def test_the_queue_equals_a_simple_model(actions, fair):
    queue, naive = FairQueue(WEIGHTS, fair=fair), NaiveQueue(fair)
    running, num_come = {}, 0
    for action, what, how in actions:
        opened = list(naive.open.values())
        if action == "come":
            prompt = [1] * (num_come % 7 + 1)
            request = make_request(str(num_come), prompt, tenant=what, priority=how)
            seq = make_sequence(num_come, request)
            num_come += 1
            queue.open(request)
            queue.add(seq)
            naive.begin(seq)
        elif action == "admit" and len(queue):
            seq = queue.first()
            queue.discard(seq)
            naive.leave(seq)
            running[seq.seq_id] = seq
        elif action == "serve" and running:
            seq = list(running.values())[what % len(running)]
            queue.charge(seq.request, how)
            naive.serve(seq, how)
        elif action == "end" and opened:
            seq = opened[what % len(opened)]
            queue.discard(seq)
            queue.close(seq.request)
            naive.end(seq)
            running.pop(seq.seq_id, None)
        elif action == "preempt" and running:
            account = naive.account(list(running.values())[what % len(running)])
            seq = max(
                (seq for seq in running.values() if naive.account(seq) == account),
                key=lambda seq: seq.seq_id,
            )
            del running[seq.seq_id]
            queue.add(seq)
            naive.wait(seq)
        queue.check_invariants()
        assert len(queue) == len(naive.waiting)
        assert {seq.seq_id for seq in queue} == set(naive.waiting)
        assert queue.num_tokens == sum(seq.num_tokens for seq in naive.waiting.values())
        if len(queue):
            assert queue.first() is naive.first()


def come(queue, seq_id, **fields):
    seq = make_sequence(seq_id, make_request(str(seq_id), [1], **fields))
    queue.open(seq.request)
    queue.add(seq)
    return seq


def go(queue, seq):
    queue.discard(seq)
    queue.close(seq.request)


def sizes(queue):
    """Entries of all that the queue keeps."""
    return len(queue._order) + sum(
        len(tenants._order) + len(tenants._debtors) + tenants.num_tenants
        for tenants in queue._queues.values()
    )


def test_the_first_of_an_empty_queue_is_a_lookup_error():
    with pytest.raises(LookupError):
        FairQueue({}, fair=True).first()


def test_tenants_that_are_served_once_and_priorities_are_forgotten():
    queue = FairQueue({}, fair=True)
    for number in range(5000):
        seq = come(queue, number, tenant=f"t{number}", priority=number)
        queue.discard(seq)
        queue.charge(seq.request, 5)
        queue.close(seq.request)
    assert not queue._queues and sizes(queue) < 200


def test_tenants_are_forgotten_while_another_waits_for_long():
    """Also those who were served, which puts them behind it, and those who gave up waiting."""
    queue = FairQueue({}, fair=True)
    come(queue, 0, tenant="patient")
    for number in range(1, 5000):
        seq = come(queue, number, tenant=f"t{number}")
        if number % 2:
            queue.discard(seq)
            queue.charge(seq.request, 5)
        go(queue, seq)
    assert sizes(queue) < MAX_DEBTORS + 200


def test_tenants_that_come_and_go_unserved_are_forgotten():
    queue = FairQueue({}, fair=True)
    come(queue, 0, priority=-1)
    come(queue, 1, tenant="other")
    for number in range(2, 5000):
        for fields in ({"tenant": "other"}, {"tenant": f"t{number}"}, {"priority": 1}):
            go(queue, come(queue, number, **fields))
    assert sizes(queue) < 500


def test_admitting_a_sequence_does_not_take_longer_with_many_tenants():
    """Keys that are looked at for each sequence that is admitted, with 10 tenants and with 1000."""
    looks = {}
    for num_tenants in (10, 1000):
        queue = FairQueue({}, fair=True)
        seqs = [come(queue, i, tenant=str(i % num_tenants)) for i in range(3 * num_tenants)]
        turns = queue._queues[0]._order
        key, count = turns._key, [0]

        def counted(account, key=key, count=count):
            count[0] += 1
            return key(account)

        turns._key = counted
        for _ in seqs:
            seq = queue.first()
            queue.discard(seq)
            queue.charge(seq.request, 3)
        looks[num_tenants] = count[0] / len(seqs)
    assert looks[1000] <= 2 * looks[10]
