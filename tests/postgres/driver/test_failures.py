"""Which exception an error becomes: decided by pure functions, tried on made-up results."""

import attrs
import psycopg
import pytest
from durable_actors._postgres.driver import failures
from durable_actors._postgres.driver.conninfo import bad_dsn
from durable_actors._postgres.driver.failures import COMMIT, NO_COMMIT
from durable_actors.errors import CommitUnknown, StoreUnavailable
from hypothesis import given, strategies as st
from psycopg.pq import DiagnosticField, ExecStatus


@attrs.frozen
class FakeResult:
    """As much of a PGresult as the decisions look at."""

    code: str | None = None
    status: int = ExecStatus.FATAL_ERROR
    text: str = "what the server said"
    function: str | None = None

    @property
    def error_message(self) -> bytes:
        return self.text.encode()

    def error_field(self, field: int) -> bytes | None:
        if field == DiagnosticField.SQLSTATE:
            return self.code.encode() if self.code else None
        if field == DiagnosticField.SOURCE_FUNCTION:
            return self.function.encode() if self.function else None
        if field == DiagnosticField.MESSAGE_PRIMARY and self.code:
            return self.text.encode()
        return None


DONE = FakeResult(status=ExecStatus.TUPLES_OK)
FATAL = FakeResult(code="57P01", text="terminating connection due to administrator command")
POOLER = FakeResult(code="08P01", text="server conn crashed?")
SILENCE = FakeResult(text="server closed the connection unexpectedly\n\tThis probably means...")
CAUSE = psycopg.OperationalError("consuming input failed:\n  gone")


@pytest.mark.parametrize(
    ("expected", "results", "kind"),
    [
        (NO_COMMIT, [], StoreUnavailable),
        (NO_COMMIT, [DONE], StoreUnavailable),
        (NO_COMMIT, [FATAL], StoreUnavailable),
        (1, [], CommitUnknown),  # sent, and then silence
        (1, [SILENCE], CommitUnknown),  # libpq's own words prove nothing
        (1, [FATAL], StoreUnavailable),  # refused before it was completed
        (1, [POOLER], CommitUnknown),  # the pooler does not know either
        (NO_COMMIT, [POOLER], StoreUnavailable),
        (1, [DONE], CommitUnknown),
        (1, [DONE, FATAL], CommitUnknown),  # completed, killed in the commit
        (3, [DONE, DONE, FATAL], StoreUnavailable),
        (3, [DONE, DONE], CommitUnknown),
        (3, [DONE, DONE, DONE, FATAL], CommitUnknown),
        (COMMIT, [FATAL], CommitUnknown),
        (COMMIT, [], CommitUnknown),
    ],
)
def test_loss(expected, results, kind):
    error = failures.loss(results, CAUSE, expected=expected, doing="park")
    assert type(error) is kind
    assert "while running park" in str(error)
    assert "\n" not in str(error)


@given(st.integers(1, 5), st.lists(st.sampled_from([DONE, SILENCE]), max_size=6))
def test_without_the_servers_word_a_lost_commit_is_never_called_not_done(expected, results):
    assert isinstance(failures.loss(results, CAUSE, expected=expected, doing="x"), CommitUnknown)


def test_loss_carries_the_servers_last_words():
    text = str(failures.loss([FATAL], CAUSE, expected=1, doing="claim"))
    assert "terminating connection due to administrator command" in text
    assert "57P01" in text
    assert "consuming input failed" in str(failures.loss([], CAUSE, expected=1, doing="claim"))


@pytest.mark.parametrize("code", [*sorted(failures.UNAVAILABLE), "08006", "08001"])
def test_a_server_that_cannot_serve(code):
    error = failures.server_error(FakeResult(code=code), doing="claim")
    assert type(error) is StoreUnavailable
    assert code in str(error)
    assert isinstance(error.__cause__, psycopg.Error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("23505", psycopg.errors.UniqueViolation),
        ("40001", psycopg.errors.SerializationFailure),
        ("40P01", psycopg.errors.DeadlockDetected),
        ("57014", psycopg.errors.QueryCanceled),
        ("08P01", psycopg.errors.ProtocolViolation),
        ("ZZ999", psycopg.DatabaseError),
        (None, psycopg.OperationalError),
    ],
)
def test_a_refused_statement_keeps_psycopgs_class_and_tells_which_it_was(code, kind):
    error = failures.server_error(FakeResult(code=code), doing="claim")
    assert type(error) is kind
    assert error.__notes__ == ["while running claim"]


def test_sets_agree():
    assert failures.RECONNECT <= failures.UNAVAILABLE
    assert not failures.RETRYABLE & failures.UNAVAILABLE


@pytest.mark.parametrize(
    ("code", "text", "function", "stale"),
    [
        ("26000", 'prepared statement "x_1" does not exist', "FetchPreparedStatement", True),
        ("0A000", "cached plan must not change result type", "RevalidateCachedQuery", True),
        ("0A000", "gecachter Plan darf den Ergebnistyp nicht ändern", "RevalidateCachedQuery", True),
        ("0A000", "cached plan, says a trigger of the user's", "exec_stmt_raise", False),
        ("0A000", "cross-database references are not implemented", "transformColumnRef", False),
        ("42P01", 'relation "x" does not exist', "parserOpenTable", False),
        (None, "cached plan", None, False),
    ],
)
def test_stale_plans(code, text, function, stale):
    assert failures.is_stale_plan(FakeResult(code=code, text=text, function=function)) is stale


@given(st.text(st.characters(codec="ascii", exclude_characters=" \0"), min_size=4))
def test_a_bad_dsn_never_shows_its_password(password):
    for dsn in (f"host=x password={password} oops", f"postgresql://u:{password}@[h/db"):
        quoted = psycopg.ProgrammingError(f'missing "=" after "{password}" in "{dsn}"')
        text = str(bad_dsn(dsn, quoted))
        assert text.endswith('missing "…"')


@pytest.mark.parametrize("begin", ["postgresql+psycopg://", "postgres:/", "mysql://"])
def test_a_uri_of_another_kind(begin):
    text = str(bad_dsn(f"{begin}ada:secret@db/shop", psycopg.ProgrammingError("missing")))
    assert text.endswith(f"a URI begins with postgresql://, not with {begin}")
