"""The overview, the queues and the list of instances: what they show, and as JSON."""

from __future__ import annotations

from datetime import UTC, datetime

import durable_actors as da
from durable_actors._store.samples import QueueSample, Sample
from durable_actors.dashboard.render import coded, environment, without_class
from durable_actors.dashboard.views.overview import counters
from tests.dashboard.conftest import OpenBrowser


async def test_an_empty_database_is_shown(open_browser: OpenBrowser):
    async with open_browser() as browser:
        page = await browser.get("/")
        assert page.status == 200
        assert "No node is alive" in page.text
        assert (await browser.get("/api/v1/")).json()["queues"] == []


async def test_what_waits_is_counted(open_browser: OpenBrowser, durable_dsn: str, registry: object):
    @da.job(queue="mail/eu")
    async def send(args: int) -> None: ...

    async with da.open_client(durable_dsn), open_browser() as browser:
        await da.insert_many(send, [{"args": n} for n in range(3)])
        await browser.resample()
        assert "No live node serves queue mail/eu: 3 instances wait" in (await browser.get("/")).text
        [queue] = (await browser.get("/api/v1/queues")).json()["queues"]
        assert (queue["queue"], queue["due"], queue["nodes"]) == ("mail/eu", 3, 0)
        assert (await browser.get("/queues/mail%2Feu")).status == 200


async def test_attention_leads_to_the_queue_and_the_queue_to_its_instances(
    open_browser: OpenBrowser, durable_dsn: str, registry: object
):
    """From "nobody serves it" to the reason of one instance: three pages."""

    @da.job(queue="mail/eu")
    async def send(args: int) -> None: ...

    async with da.open_client(durable_dsn), open_browser() as browser:
        number = await da.insert(send, args=1)
        await browser.resample()
        assert 'href="/queues/mail%2Feu"' in (await browser.get("/")).text
        page = (await browser.get("/queues/mail%2Feu")).text
        assert "/instances?q=queue%3A%22mail%2Feu%22" in page
        assert f'href="/instances/{number}"' in (await browser.get('/instances?q=queue:"mail/eu"')).text
        assert "no live node serves queue" in (await browser.get(f"/instances/{number}")).text


def test_what_is_counted_in_all_queues_together_says_so():
    """A queue's share of a count that has reached its cap is no exact number."""
    at = datetime.now(UTC)
    rows = (QueueSample(queue="a", executing=6_000, held=5), QueueSample(queue="b", executing=4_001, held=5))
    sample = Sample(at=at, queues=rows)
    assert sample.partly == ("executing",)
    [running] = [each for each in counters(sample) if each["name"] == "running"]
    assert (running["value"], running["capped"]) == (10_001, True)
    values = {"queues": rows, "bars": {"a": "", "b": ""}, "root": ""}
    macro = environment().get_template("macros.html").module.queue_table
    assert "6,000+" in macro(values["queues"], values["bars"], "", sample.partly)
    assert "6,000+" not in macro(values["queues"], values["bars"], "", ())


def test_sentences_show_code_and_errors_show_their_class_once():
    assert str(coded("say `a <b>` & go")) == "say <code>a &lt;b&gt;</code> &amp; go"
    assert str(coded("an odd ` stays text")) == "an odd ` stays text"
    assert without_class("m.E: no", "m.E") == "no"
    assert without_class("no", None) == "no"
