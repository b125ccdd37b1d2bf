"""Who may wait, and what the others are told."""

from __future__ import annotations

import pytest

from paged_backend.process.admission import MAX_RETRY_AFTER_S, QueueBounds, ThroughputEstimate
from paged_backend.process.status_page import StatusPage
from paged_backend.values.errors import RequestRefused
from paged_backend.values.outputs import QueueState

BOUNDS = QueueBounds(max_waiting_requests=4, max_waiting_tokens=100)


def refusal(queue: QueueState, num_tokens: int, retry_after_s: int = 3) -> str:
    with pytest.raises(RequestRefused) as caught:
        BOUNDS.check(queue, num_tokens, retry_after_s)
    assert caught.value.reason == "queue_full"
    return str(caught.value)


@pytest.mark.parametrize(
    ("queue", "num_tokens"),
    [
        (QueueState(0, 0, 0), 10**6),  # whatever its size, one may wait
        (QueueState(3, 60, 0), 40),
        (QueueState(7, 10**6, 8), 10**6),  # all of these start with the next step
        (QueueState(11, 60, 8), 40),
    ],
)
def test_what_there_is_room_for_may_wait(queue, num_tokens):
    BOUNDS.check(queue, num_tokens, 3)


def test_a_request_too_many_hears_of_the_limit_and_when_to_come_again():
    text = refusal(QueueState(4, 40, 0), 1)
    assert text == "queue_full: 4 requests wait already (max_waiting_requests); retry after 3 s"


def test_so_does_one_with_tokens_too_many():
    text = refusal(QueueState(2, 60, 1), 41, retry_after_s=0)
    assert text == "queue_full: 60 tokens wait already (max_waiting_tokens); retry after 1 s"


def test_seats_count_as_room_only_while_they_are_free():
    BOUNDS.check(QueueState(11, 40, 8), 1, 3)
    refusal(QueueState(12, 40, 8), 1)


def test_one_tenant_cannot_take_every_place():
    bounds = QueueBounds(max_waiting_requests=90, max_waiting_tokens=10**6)

    def fill(num_others):
        num_own = 0
        with pytest.raises(RequestRefused, match="requests of this tenant wait already"):
            while True:
                bounds.check_share(QueueState(num_others + num_own, 0, 0), num_own, 1)
                num_own += 1
        return num_own

    flood = fill(num_others=0)
    assert flood == 81  # 8 of 9 places, and the one that it was let in with
    assert fill(num_others=flood) == 9


def test_the_wait_follows_the_rate_of_the_last_seconds():
    turnover = ThroughputEstimate()
    assert turnover.seconds_for(1) == MAX_RETRY_AFTER_S  # nothing is known yet
    for second in range(60):
        turnover.note(10 * second, float(second))
    assert turnover.seconds_for(100) == 11  # 10 a second, nearly
    assert turnover.seconds_for(0) == 0
    for second in range(60, 180):
        turnover.note(590, float(second))
    assert turnover.seconds_for(1) == MAX_RETRY_AFTER_S  # nothing ends any more


def test_a_page_is_seen_by_another_and_a_new_one_begins_anew(tmp_path):
    page = StatusPage.create(tmp_path)
    assert (tmp_path / "status").stat().st_mode & 0o077 == 0
    reader = StatusPage.open(tmp_path)
    assert (reader.beat, reader.retry_after_s) == (0, 0)
    page.write(QueueState(5, 600, 7), 9)
    page.write(QueueState(6, 700, 8), 10)
    assert (reader.beat, reader.retry_after_s, reader.queue) == (2, 10, QueueState(6, 700, 8))
    after = StatusPage.create(tmp_path)
    after.write(QueueState(1, 1, 1), 1)
    assert reader.beat == 2
    assert StatusPage.open(tmp_path).beat == 1
    for each in (page, reader, after):
        each.close()
