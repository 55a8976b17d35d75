"""Who may do what: binds, tokens, passwords, roles, forged requests, headers. The server decides, not the page."""

from __future__ import annotations

import base64

import durable_actors as da
import pytest
from durable_actors.dashboard_options import Access, AccessRequest, Dashboard, is_loopback
from durable_actors.errors import ConfigError
from tests.dashboard.conftest import OpenBrowser

TOKEN = "0123456789abcdef-operator"
VIEWER = "0123456789abcdef-viewer"
PAUSE = "/queues/mail/pause"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "127.0.0.1.example.org"])
def test_other_binds_need_authentication(host: str):
    with pytest.raises(ConfigError, match="can be reached from other computers"):
        Dashboard(host=host)
    assert Dashboard(host=host, token=TOKEN).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_loopback_needs_none(host: str):
    assert is_loopback(Dashboard(host=host).host)


def test_short_tokens_are_refused_and_secrets_are_not_printed():
    with pytest.raises(ConfigError, match="at least 16"):
        Dashboard(token="short")
    assert TOKEN not in repr(Dashboard(token=TOKEN, users={"ann": "hunter2hunter2"}))
    assert "hunter2" not in repr(Dashboard(token=TOKEN, users={"ann": "hunter2hunter2"}))


async def test_without_authentication_only_names_of_this_computer_are_answered(open_browser: OpenBrowser):
    """Another site may let its own name resolve to 127.0.0.1: its pages would be same-origin with the dashboard."""
    async with open_browser() as browser:
        for host, status in (
            ("localhost:8765", 200),
            ("[::1]:8765", 200),
            ("evil.example:8765", 421),
            ("", 421),
        ):
            browser.headers["host"] = host
            assert (await browser.get("/")).status == status


async def test_tokens(open_browser: OpenBrowser):
    async with open_browser(token=TOKEN, viewer_token=VIEWER) as browser:
        unknown = await browser.get("/queues?q=x")
        assert (unknown.status, unknown.headers["location"]) == (303, "/login?next=%2Fqueues%3Fq%3Dx")
        assert (await browser.get("/api/v1/queues")).status == 401
        assert (await browser.get("/api/v1/queues", authorization=f"Bearer {TOKEN}x")).status == 401
        assert (await browser.get("/api/v1/queues", authorization=f"Bearer {TOKEN}")).status == 200
        assert (await browser.post(PAUSE, authorization=f"Bearer {VIEWER}")).status == 403
        assert (await browser.post(PAUSE, authorization=f"Bearer {TOKEN}")).status == 303
        assert (await browser.post(PAUSE)).status == 401
        assert (await browser.get("/metrics")).status == 303
        assert (await browser.get("/healthz")).status == 200


async def test_login_sets_a_cookie_that_is_not_the_token(open_browser: OpenBrowser):
    async with open_browser(token=TOKEN) as browser:
        assert (await browser.post("/login", {"token": "wrong"})).status == 401
        done = await browser.post("/login", {"token": TOKEN, "next": "//evil.example/"})
        assert (done.status, done.headers["location"]) == (303, "/")
        strange = await browser.post("/login", {"token": TOKEN, "next": "/\u65e5\u672c\r\nX: y"})
        assert (strange.status, strange.headers["location"]) == (303, "/")
        cookie = done.headers["set-cookie"]
        assert TOKEN not in cookie
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        page = await browser.get("/", cookie=cookie.partition(";")[0])
        assert page.status == 200
        assert (await browser.get("/", cookie="durable_actors_session=forged")).status == 303
        others = f'{{"a": 1}}=x; b[c]=1; =; ;; {cookie.partition(";")[0]}; d="e'
        assert (await browser.get("/", cookie=others)).status == 200, "those of other programs do no harm"


async def test_basic_authentication(open_browser: OpenBrowser):
    async with open_browser(users={"ann": "a secret"}, viewers={"bob": "another"}) as browser:

        def basic(text: str) -> str:
            return "Basic " + base64.b64encode(text.encode()).decode()

        challenge = await browser.get("/")
        assert challenge.status == 401
        assert challenge.headers["www-authenticate"].startswith("Basic")
        for shown, status in (
            ("ann:a secret", 200),
            ("ann:another", 401),
            ("bob:another", 200),
            ("ann", 401),
        ):
            assert (await browser.get("/", authorization=basic(shown))).status == status
        assert (await browser.get("/", authorization="Basic ***")).status == 401
        assert (await browser.post(PAUSE, authorization=basic("bob:another"))).status == 403
        assert (await browser.post(PAUSE, authorization=basic("ann:a secret"))).status == 303
        receipts = (await browser.get("/api/v1/queues/mail", authorization=basic("bob:another"))).json()[
            "receipts"
        ]
        assert receipts[0]["by"] == "ann"


async def test_authorize_decides_for_each_action(open_browser: OpenBrowser):
    asked: list[AccessRequest] = []

    async def authorize(request: AccessRequest) -> Access | None:
        asked.append(request)
        if request.headers.get("x-user") is None:
            return None
        return Access(request.headers["x-user"], "viewer" if request.action == "resume_queue" else "operator")

    async with open_browser(authorize=authorize) as browser:
        assert (await browser.get("/")).status == 403
        assert (await browser.get("/", x_user="eve")).status == 200
        assert (await browser.post(PAUSE, x_user="eve")).status == 303
        assert (await browser.post("/queues/mail/resume", x_user="eve")).status == 403
        assert [each.action for each in asked] == [None, None, "pause_queue", "resume_queue"]


async def test_authorize_decides_which_command_may_be_given_to_many(open_browser: OpenBrowser):
    """The path is the same for all of them: only the form says what is asked for."""
    asked: list[str | None] = []

    def authorize(request: AccessRequest) -> Access:
        asked.append(request.action)
        return Access("eve", "viewer" if request.action == "cancel" else "operator")

    async with open_browser(authorize=authorize) as browser:
        form = {"id": "1", "scope": "selected"}
        assert (await browser.post("/instances/bulk", {**form, "command": "cancel"})).status == 403
        assert (await browser.post("/instances/bulk", {**form, "command": "retry"})).status == 200
        everything = {"scope": "all", "q": "status:failed", "command": "cancel", "confirm": "yes"}
        assert (await browser.post("/instances/bulk", everything)).status == 403
        assert asked == ["bulk", "cancel", "bulk", "retry", "bulk", "cancel"]


async def test_an_authorizer_that_fails_lets_nobody_in(
    open_browser: OpenBrowser, caplog: pytest.LogCaptureFixture
):
    async with open_browser(authorize=lambda request: "yes") as browser:
        assert (await browser.get("/")).status == 500


async def test_a_read_only_dashboard_refuses_every_command(open_browser: OpenBrowser):
    async with open_browser(read_only=True) as browser:
        answer = await browser.post(PAUSE)
        assert (answer.status, "read-only" in answer.text) == (403, True)
        assert "Pause this queue" not in (await browser.get("/queues/mail")).text


FORGED = [
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
    {"sec_fetch_site": "none"},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:9999"},
]


@pytest.mark.parametrize("headers", FORGED, ids=str)
async def test_forged_forms_are_refused(open_browser: OpenBrowser, headers: dict[str, str]):
    async with open_browser() as browser:
        assert (await browser.post(PAUSE, **headers)).status == 403
        assert (await browser.get("/api/v1/queues/mail")).json()["pauses"] == []


async def test_forms_of_the_dashboard_itself_are_not(open_browser: OpenBrowser):
    async with open_browser() as browser:
        assert (await browser.post(PAUSE, origin="http://127.0.0.1:8765")).status == 303
        plain = await browser.ask("POST", "/queues/mail/resume", b"", {"content-type": "text/plain"})
        assert plain.status == 415  # what a form of another site can send without asking


@pytest.mark.parametrize(
    "path", ["/", "/queues", "/instances", "/nope", "/static/dashboard.js", "/metrics", "/healthz"]
)
async def test_every_answer_has_the_security_headers(open_browser: OpenBrowser, path: str):
    async with open_browser() as browser:
        answer = await browser.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        if answer.headers["content-type"].startswith("text/html"):
            assert "style=" not in answer.text
            assert "<style" not in answer.text
            assert "onclick" not in answer.text


async def test_a_prefix_is_part_of_every_link(open_browser: OpenBrowser):
    async with open_browser() as browser:
        browser.root_path = "/ops"
        page = (await browser.get("/ops/queues")).text
        assert 'href="/ops/instances"' in page
        assert 'href="/instances"' not in page
        assert (await browser.post("/ops" + PAUSE)).headers["location"].startswith("/ops/queues/mail")
        for path in ("/ops", "/ops/", "/", "/ops/api/v1", "/api/v1/"):  # with the prefix, or without it
            assert (await browser.get(path)).status == 200, path


async def test_a_prefix_is_not_taken_from_a_header(open_browser: OpenBrowser):
    """Anybody could send it; `root_path` is for that."""
    async with open_browser() as browser:
        page = (
            await browser.get("/queues", x_forwarded_prefix="/evil", x_forwarded_host="evil.example")
        ).text
        assert 'href="/instances"' in page
        assert "evil" not in page


def test_config_takes_only_a_dashboard():
    with pytest.raises(ConfigError, match="must be a Dashboard"):
        da.Config(dsn="postgresql:///x", dashboard=8765)
