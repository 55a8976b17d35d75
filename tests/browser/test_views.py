"""Approvals, triage, machines, schedules and nodes in Chromium: what a person does there."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.kit import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def api(shop: str, path: str) -> Any:
    return httpx.get(f"{shop}/api/v1{path}", timeout=20).json()


def test_decisions_are_taken_in_the_inbox(page: Any, shop: str):
    first, second, third, *_ = (each["id"] for each in api(shop, "/approvals")["asks"])
    page.goto(f"{shop}/approvals")
    typed = page.locator(f"#ask-{second} input[name=comment]")
    typed.fill("too expensive")
    answer = httpx.post(f"{shop}/api/v1/approvals/{first}/approve", data={"comment": "elsewhere"}, timeout=20)
    assert answer.status_code == 200
    page.locator(f"#ask-{first}").wait_for(state="detached")  # nobody has reloaded the page
    assert typed.input_value() == "too expensive"
    page.locator(f"#ask-{second} input[name=confirm]").check()
    page.locator(f"#ask-{second}").get_by_role("button", name="Reject").click()
    page.get_by_text("It is rejected.").wait_for()
    page.locator(f"#ask-{third}").get_by_role("button", name="Approve").click()
    page.get_by_text("It is approved.").wait_for()
    [receipt] = api(shop, f"/audit?command=reject&target={second}")["receipts"]
    assert receipt["by"] == "dashboard"


def test_a_group_of_failures_is_retried(page: Any, shop: str):
    wait_until(lambda: api(shop, "/triage")["groups"], "something has failed")
    page.goto(f"{shop}/triage")
    page.get_by_role("button", name="Retry …").first.click()
    page.get_by_text("Nothing has happened yet").wait_for()
    page.locator("input[name=reason]").fill("the printer has ink")
    page.get_by_label("I mean all").check()
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("The retry has begun").wait_for()
    page.locator("#bulks", has_text="the printer has ink").locator(".chip.good").first.wait_for()


def test_a_schedule_is_paused_resumed_and_run(page: Any, shop: str):
    page.goto(f"{shop}/schedules")
    page.get_by_role("link", name="shop.clean_up").first.click()
    for summary, button, told in (
        ("Pause", "Pause", "The schedule is paused."),
        ("Resume", "Resume", "The schedule is resumed."),
    ):
        page.locator("summary", has_text=summary).click()
        page.get_by_role("button", name=button, exact=True).click()
        page.get_by_text(told, exact=True).wait_for()
    page.locator("summary", has_text="Run now").click()
    page.get_by_label("also beside one that runs").check()
    page.get_by_label("Start it").check()
    page.get_by_role("button", name="Run now").click()
    page.get_by_text("An instance was started.").wait_for()
    commands = [each["command"] for each in api(shop, "/schedules/shop.clean_up")["receipts"]]
    assert commands[:3] == ["run_now", "resume", "pause"]


def test_a_limit_says_who_waits_and_who_has_the_slots_and_is_set(page: Any, shop: str):
    page.goto(f"{shop}/limits")
    assert page.locator("tr", has_text="courier").get_by_text("not declared").count() == 1
    page.get_by_role("link", name="labels").click()
    holder = page.locator("#holders tbody a").first
    number = holder.inner_text()
    holder.click()
    page.wait_for_url(f"**/instances/{number}")
    page.goto(f"{shop}/limits/bank")
    page.get_by_role("region", name="Table of keys").get_by_text("north").wait_for()
    page.locator("summary", has_text="Set").click()
    page.locator("input[name=rate]").fill("2")
    page.locator("input[name=reason]").fill("the bank asks for patience")
    page.get_by_label("I mean it").check()
    page.get_by_role("button", name="Set it").click()
    page.get_by_text("The limit is set.").wait_for()
    assert "2 per minute" in page.locator("#head .lead").inner_text()
    page.locator("summary", has_text="Clear").click()
    page.get_by_role("button", name="Clear it").click()
    page.get_by_text("What the code declares counts again.").wait_for()
    commands = [each["command"] for each in api(shop, "/limits/bank")["receipts"]]
    assert commands[:2] == ["clear", "set"]


def test_a_fair_queue_shows_the_shares_of_its_keys(page: Any, shop: str):
    page.goto(f"{shop}/queues/images")
    table = page.get_by_role("region", name="Table of fair keys")
    table.get_by_text("fee").wait_for()
    assert table.locator("tbody tr").count() >= 5


def test_a_machine_shows_where_its_instances_stand(page: Any, shop: str):
    page.goto(f"{shop}/machines?q=Checkout")
    page.get_by_role("link", name="shop.Checkout").click()
    page.locator("#graph svg").wait_for()
    assert "waiting" in page.locator("#graph svg").text_content()
    page.get_by_role("region", name="Table of steps").get_by_role("link", name="ship").click()
    page.wait_for_url("**/instances?q=*")
    assert page.locator("tr[data-row]").count() > 0


def test_the_tree_of_this_process_is_alive(page: Any, shop: str):
    page.goto(f"{shop}/nodes")
    page.locator("tr", has_text="this process").get_by_role("link").first.click()
    tree = page.locator("#tree")
    for part in ("supervisor", "heartbeat", "pool", "mailbox"):
        tree.get_by_text(part).first.wait_for()
