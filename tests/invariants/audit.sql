-- audit: triggers record every change of instances and of their inboxes, in a schema of its own.
-- Written for schema "durable", read by `tests.invariants.audit`. For tests only: a write costs two to three times as much.
--
-- order    seq is drawn while the row is locked: for one instance, and the signals sent to it, the order of seq is the order of
--          the transactions. Between instances this holds if one transaction waited for, or saw, the other.
-- what     the columns that the invariants refer to; state and result as hashes. As composite values: a change that was recorded
--          as JSON cost 235 µs instead of 60. Separate types, because a column of the table's row type would prevent
--          migrations from altering the table.
-- who      application_name. If each worker process has its own, the audit shows a write by a worker that does not own the row.
-- when     began: now() of its transaction; at: the moment of the write; snapshot: the transactions that had ended at a moment
--          between `at` and `seen`, so every change is evidence of the commits of others. Null if the snapshot is older than
--          the statement (repeatable read).
-- crashes  a logged table, in the transaction of the change: a server crash loses both or neither.

create schema durable_audit;

create type durable_audit.instance as (
    id bigint, status durable.durable_status, visit bigint, round int, rev bigint, step text, attempt int, crashes int, claim_id uuid,
    locked_by text, lease_expires_at timestamptz, eligible_at timestamptz, await_deadline timestamptz, awaits text[],
    await_step text, hold smallint, priority smallint, queue text, fsm text, version int, partition_key text, unique_key bytea,
    unique_scope durable.durable_status[], parent_id bigint, barrier bigint, children_total int, children_pending int,
    wake_on_failure boolean, inbox boolean, last_error text, request text, manual jsonb, cancellation jsonb, slot text, rerun_of bigint,
    state bigint, result bigint);

create type durable_audit.signal as (id bigint, target_id bigint, name text, dedup_key text, consumed_at timestamptz);

create table durable_audit.change (
    seq        bigint generated always as identity primary key,
    txid       xid8 not null default pg_current_xact_id(),
    began      timestamptz not null default now(),
    at         timestamptz not null,
    snapshot   text default case when current_setting('transaction_isolation') = 'read committed'
                                 then pg_current_snapshot()::text end,
    seen       timestamptz not null default clock_timestamp(),
    writer     text not null default current_setting('application_name'),
    backend    int not null default pg_backend_pid(),
    instance   bigint not null,                     -- the instance, or the target of the signal
    before     durable_audit.instance,
    after      durable_audit.instance,
    old_signal durable_audit.signal,
    new_signal durable_audit.signal
);

-- Readings of the server's clock, with the clock of the machine on which the steps run.
create table durable_audit.clock (
    monotonic_ns bigint not null,
    at           timestamptz not null,
    doubt        float8 not null                    -- possible error in seconds: half of the round trip
);

-- PL/pgSQL, because it caches plans. A trigger cannot inline SQL functions, so they would be planned again for every row.
create function durable_audit.recorded(g durable.gen_durable) returns durable_audit.instance language plpgsql stable as $$
begin
    return row(g.id, g.status, g.visit, g.round, g.rev, g.step, g.attempt, g.crashes, g.claim_id, g.locked_by, g.lease_expires_at,
               g.eligible_at, g.await_deadline, g.awaits, g.await_step, g.hold, g.priority, g.queue, g.fsm, g.fsm_version,
               g.partition_key, g.unique_key, g.unique_scope, g.parent_id, g.barrier, g.children_total, g.children_pending,
               g.wake_on_failure, g.inbox, left(g.last_error, 200), to_jsonb(g) ->> 'request',
               nullif(to_jsonb(g) -> 'manual', 'null'), nullif(to_jsonb(g) -> 'cancellation', 'null'),
               substring(to_jsonb(g) ->> 'rate_limit' from '(?:^|' || chr(31) || ')!([^' || chr(30) || chr(31) || ']*)'), (to_jsonb(g) ->> 'rerun_of')::bigint,
               jsonb_hash_extended(g.state, 0), jsonb_hash_extended(g.result, 0))::durable_audit.instance;
end $$;

create function durable_audit.recorded(s durable.signals) returns durable_audit.signal language plpgsql stable as $$
begin
    return row(s.id, s.target_id, s.name, s.dedup_key, s.consumed_at)::durable_audit.signal;
end $$;

create function durable_audit.record_instance() returns trigger language plpgsql as $$
declare
    moment timestamptz := clock_timestamp();  -- before the insert's snapshot is taken
begin
    insert into durable_audit.change (at, instance, before, after)
    values (moment, case when tg_op = 'DELETE' then old.id else new.id end,
            case when tg_op <> 'INSERT' then durable_audit.recorded(old) end,
            case when tg_op <> 'DELETE' then durable_audit.recorded(new) end);
    return null;
end $$;

create function durable_audit.record_signal() returns trigger language plpgsql as $$
declare
    moment timestamptz := clock_timestamp();
begin
    insert into durable_audit.change (at, instance, old_signal, new_signal)
    values (moment, case when tg_op = 'DELETE' then old.target_id else new.target_id end,
            case when tg_op <> 'INSERT' then durable_audit.recorded(old) end,
            case when tg_op <> 'DELETE' then durable_audit.recorded(new) end);
    return null;
end $$;

create trigger durable_audit after insert or update or delete on durable.gen_durable
    for each row execute function durable_audit.record_instance();
create trigger durable_audit after insert or update or delete on durable.signals
    for each row execute function durable_audit.record_signal();
