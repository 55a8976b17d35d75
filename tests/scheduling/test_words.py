"""When a schedule fires, in words."""

from __future__ import annotations

import pytest
from durable_actors._scheduling.slots import Rule
from durable_actors._scheduling.words import rule_words


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("0 3 * * *", "every day at 03:00, UTC"),
        ("@daily", "every day at 00:00, UTC"),
        ("* * * * *", "every minute, UTC"),
        ("*/15 * * * *", "every 15 minutes, UTC"),
        ("*/7 * * * *", None),
        ("0 * * * *", "every hour, UTC"),
        ("5 * * * *", "every hour at minute 5, UTC"),
        ("30 9 * * 1-5", "Monday to Friday at 09:30, UTC"),
        ("30 9 * * MON", "every Monday at 09:30, UTC"),
        ("30 9 * * 6,0", "every Saturday and Sunday at 09:30, UTC"),
        ("0 4 1 * *", "on day 1 of every month at 04:00, UTC"),
        ("0 4 1 * 1", None),
        ("0 4 * 2 *", None),
        ("0 4 L * *", None),
        ("0 4 * * 1#2", None),
        ("*/5 * * * 1-5", None),
        ("nonsense", None),
    ],
)
def test_cron_in_words(cron: str, words: str | None):
    assert rule_words(Rule(cron=cron)) == words


def test_a_zone_is_named():
    assert rule_words(Rule(cron="0 3 * * *", tz="Europe/Berlin")) == "every day at 03:00, Europe/Berlin"


@pytest.mark.parametrize(
    ("every", "words"),
    [
        (30, "every 30 seconds"),
        (60, "every minute"),
        (7200, "every 2 hours"),
        (86400, "every day"),
        (1.5, "every 1.5 s"),
    ],
)
def test_periods_in_words(every: float, words: str):
    assert rule_words(Rule(every=every)) == words
