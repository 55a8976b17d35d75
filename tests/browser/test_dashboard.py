"""The dashboard in Chromium: every page in both themes, no complaint of console or axe; commands; live updates."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from durable_actors.dashboard.views import PAGES
from tests.browser.tools import AXE
from tests.kit import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


SHOW = """state => {
    Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def api(shop: str, path: str) -> Any:
    return httpx.get(f"{shop}/api/v1{path}", timeout=20).json()


def newest(shop: str, q: str) -> int:
    """The newest one that matches, as soon as there is one: another test may have just retried all that failed."""
    found = wait_until(lambda: api(shop, f"/instances?q={q}")["instances"], f"there is {q}", timeout=60)
    return found[0]["id"]


def paths(shop: str) -> list[str]:
    """Every page that needs no name, and some of those that do."""
    failed, report = newest(shop, "status:failed"), newest(shop, "machine:shop.Report")
    asked = newest(shop, "waiting:approval")
    node = api(shop, "/nodes")["nodes"][0]["incarnation"]
    plain = [page.path for page in PAGES if "{" not in page.path]
    return [
        *plain,
        "/queues/mail",
        "/instances?q=status:failed",
        "/instances?q=status:nonsense",
        f"/instances/{failed}?rev=3",
        f"/instances/{report}",
        f"/instances/{asked}",
        "/triage?by=error",
        "/machines/shop.Checkout",
        "/machines/shop.Report",
        "/schedules/shop.clean_up",
        "/queues/images",
        "/limits/bank",
        "/limits/labels",
        "/limits/courier",
        f"/nodes/{node}",
        "/audit?by=dora",
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible_and_fits(page: Any, shop: str, scheme: str):
    page.emulate_media(color_scheme=scheme)
    failures: list[str] = []
    seen: list[str] = []
    page.on("response", lambda response: seen.append(f"{response.status} {response.url}"))
    for path in paths(shop):
        page.goto(shop + path)
        page.evaluate(AXE.read_text("utf-8"))
        found = page.evaluate(
            "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice']})"
        )
        failures += [
            f"{path}: {each['id']}: {each['nodes'][0]['html'][:200]} {each['nodes'][0]['failureSummary'][:300]}"
            for each in found["violations"]
        ]
    page.set_viewport_size({"width": 390, "height": 844})
    for path in paths(shop) if scheme == "light" else ():  # a width has no colour
        page.goto(shop + path)
        if page.evaluate("document.documentElement.scrollWidth") > 390:
            failures.append(f"{path}: wider than a phone")
    assert not failures, "\n".join(failures)
    assert not [each for each in seen if each.startswith("5")]


def test_themes_are_kept(page: Any, shop: str):
    page.goto(f"{shop}/queues")
    page.get_by_role("button", name="Dark theme").click()
    page.locator("html[data-theme=dark]").wait_for()
    page.wait_for_load_state()  # the style sheet, too
    assert page.url == f"{shop}/queues"
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    page.get_by_role("button", name="System theme").click()


def test_live_updates_change_numbers_and_keep_what_is_typed(page: Any, shop: str):
    page.goto(f"{shop}/queues/images")
    page.get_by_text("Pause this queue").click()
    reason = page.locator("details.action input[name=reason]")
    reason.fill("while I type")
    reason.focus()
    answer = httpx.post(f"{shop}/api/v1/queues/images/pause", data={"reason": "from elsewhere"}, timeout=20)
    assert answer.status_code == 200
    page.get_by_text("The whole queue is paused").wait_for()  # nobody has reloaded the page
    assert reason.input_value() == "while I type"
    assert page.evaluate("document.activeElement.name") == "reason"
    page.keyboard.press("Escape")
    page.keyboard.press("r")
    assert page.locator("[data-live-button]").get_attribute("aria-pressed") == "false"
    httpx.post(f"{shop}/api/v1/queues/images/resume", data={}, timeout=20)


def test_a_hidden_tab_asks_for_nothing(page: Any, shop: str):
    page.goto(f"{shop}/queues")
    wait_until(lambda: page.evaluate("stream?.readyState === EventSource.OPEN"), "it listens")
    page.evaluate(SHOW, "hidden")
    assert page.evaluate("stream === null"), "nobody looks"
    with page.expect_request(lambda request: "x-live" in request.headers):  # what has changed meanwhile
        page.evaluate(SHOW, "visible")
    wait_until(lambda: page.evaluate("stream?.readyState === EventSource.OPEN"), "it listens")


def test_every_page_can_be_read_without_javascript(page: Any, shop: str):
    page.context.new_cdp_session(page).send("Emulation.setScriptExecutionDisabled", {"value": True})
    for path in paths(shop):
        page.goto(shop + path)
        assert page.locator("h1").count() == 1, path
        assert page.locator("[data-live-button]:visible").count() == 0, "a button that does nothing"
    page.goto(f"{shop}/instances")
    page.locator("input#bar").fill("status:failed")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**/instances?q=status*")
    page.goto(f"{shop}/queues/reports")
    page.get_by_text("Pause this queue").click()
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_text("The queue is paused.").wait_for()
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("The queue is resumed.").wait_for()


def test_a_queue_is_paused_and_resumed(page: Any, shop: str):
    page.goto(f"{shop}/queues/legacy")
    page.get_by_text("Pause this queue").click()
    page.locator("details.action input[name=reason]").fill("maintenance")
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_text("The queue is paused.").wait_for()
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("The queue is resumed.").wait_for()
    commands = [each["command"] for each in api(shop, "/queues/legacy")["receipts"]]
    assert len(commands) == 2


def test_why_is_the_first_thing_and_an_approval_is_given(page: Any, shop: str):
    page.goto(f"{shop}/instances?q=waiting:approval")
    page.locator("tbody a").first.click()
    assert "waits for an approval" in page.locator(".why .summary").inner_text()
    page.locator("input[name=comment]").fill("fine")
    page.get_by_role("button", name="Approve").click()
    page.get_by_text("It is approved.").wait_for()


def test_all_failed_ones_are_retried(page: Any, shop: str):
    page.goto(f"{shop}/instances?q=status:failed machine:shop.Checkout")
    page.get_by_text("Commands").click()
    page.locator("select[name=scope]").select_option("all")
    page.locator("input[name=reason]").fill("the bank is back")
    page.get_by_role("button", name="Go on").click()
    assert "instances match" in page.locator("main .summary").inner_text()
    page.get_by_label("I mean all").check()
    page.locator("button.danger").click()
    page.get_by_text("A worker carries out the command").wait_for()
    page.locator("#head .status", has_text="done").wait_for()  # the page shows its progress, live


def test_one_is_cancelled_signalled_and_rerun(page: Any, shop: str):
    number = newest(shop, "status:awaiting_signal+machine:shop.Checkout+waiting:signal")
    page.goto(f"{shop}/instances/{number}")
    page.get_by_text("Send a signal").click()
    page.locator("input[name=name]").fill("hello")
    page.locator("input[name=payload]").fill('{"html": "<b>bold</b>"}')
    page.get_by_role("button", name="Send").click()
    page.get_by_text("The signal is in its inbox.").wait_for()
    assert page.locator("#inbox b").count() == 0  # stored HTML is text
    page.locator("summary", has_text="Cancel").click()
    page.get_by_label("I mean it").check()
    page.get_by_role("button", name="Cancel it").click()
    page.get_by_text("It is cancelled").wait_for()
    page.get_by_text("Rerun as a new instance").click()
    page.get_by_label("Start it").check()
    page.get_by_role("button", name="Rerun").click()
    page.get_by_text("This is the new instance.").wait_for()


def test_the_commands_of_an_instance_follow_it(page: Any, shop: str):
    """Somebody else has cancelled it: the page offers what can be done now, and keeps what is being typed."""
    number = newest(shop, "status:awaiting_signal+machine:shop.Checkout+waiting:signal")
    page.goto(f"{shop}/instances/{number}")
    page.locator("#do-rerun summary").click()
    typed = page.locator("#do-rerun textarea")
    typed.fill('{"n": 1}')
    typed.focus()
    answer = httpx.post(f"{shop}/api/v1/instances/{number}/cancel", data={"confirm": "yes"}, timeout=20)
    assert answer.status_code == 200
    page.locator("#do-cancel").wait_for(state="detached")  # nobody has reloaded the page
    page.locator("#do-retry").wait_for()
    assert page.locator("#do-pause, #do-signal").count() == 0
    assert typed.input_value() == '{"n": 1}'
    assert typed.is_visible()
    assert page.evaluate("document.activeElement.name") == "state"


def test_what_is_selected_opens_the_commands_to_many(page: Any, shop: str):
    page.goto(f"{shop}/instances")
    bulk = page.locator("[data-bulk]")
    assert bulk.get_attribute("open") is None
    page.locator("input[data-pick]").nth(1).check()
    page.locator("select[name=command]").wait_for()
    assert "1 selected" in bulk.locator("summary").inner_text()
    box = bulk.bounding_box()
    assert box["y"] + box["height"] <= 900, "it is on the screen, however long the list is"
    bulk.locator("summary").click()
    page.locator("input[data-pick]").nth(2).check()
    assert not page.locator("select[name=command]").is_visible()  # closed by hand, it stays closed


def test_keys(page: Any, shop: str):
    page.goto(shop)
    page.keyboard.press("i")
    page.wait_for_url("**/instances")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "bar"
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("x")
    assert page.locator("[data-picked]").text_content() == "1"
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keys").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    page.wait_for_url("**/instances/*")
