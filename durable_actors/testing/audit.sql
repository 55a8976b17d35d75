-- audit: record every change of the instances and of their inboxes, by triggers, in a schema of its own.
-- Written for schema "durable" and read by `durable_actors.testing.audit`. For tests: it doubles the cost of a write.
--
-- order    seq is drawn while the row is locked: of one instance, and of the signals sent to it, the order of seq is the order
--          of the transactions. Between instances it is so where one transaction waited for, or saw, the other.
-- what     the columns that invariants speak of; the state and the result as fingerprints.
-- who      application_name: give each worker process one of its own, and a write by a worker that does not own the row shows.
-- when     began: now() of its transaction; at: the moment of the write; snapshot: which transactions had ended between `at` and
--          `seen`, so that every change testifies to the commits of others. Null where the snapshot is an old one
--          (repeatable read).
-- crashes  a logged table, in the transaction of the change: a server that crashes loses both or neither.

create schema durable_audit;

create table durable_audit.change (
    seq      bigint generated always as identity primary key,
    txid     xid8 not null default pg_current_xact_id(),
    began    timestamptz not null default now(),
    at       timestamptz not null,
    snapshot text default case when current_setting('transaction_isolation') = 'read committed'
                               then pg_current_snapshot()::text end,
    seen     timestamptz not null default clock_timestamp(),
    writer   text not null default current_setting('application_name'),
    backend  int not null default pg_backend_pid(),
    source   "char" not null,                     -- i: instance · s: signal
    instance bigint not null,
    before   jsonb,
    after    jsonb
);

-- When the server's clock showed what, by the clock of the machine that the steps run on.
create table durable_audit.clock (
    monotonic_ns bigint not null,
    at           timestamptz not null,
    doubt        float8 not null                  -- seconds: half of the round trip
);

create function durable_audit.told(g durable.gen_durable) returns jsonb language sql stable as $$
    select jsonb_build_object(
        'id', g.id, 'status', g.status, 'visit', g.visit, 'rev', g.rev, 'step', g.step, 'attempt', g.attempt,
        'crashes', g.crashes, 'claim_id', g.claim_id, 'locked_by', g.locked_by,
        'lease_expires_at', extract(epoch from g.lease_expires_at), 'eligible_at', extract(epoch from g.eligible_at),
        'await_deadline', extract(epoch from g.await_deadline), 'awaits', g.awaits, 'await_step', g.await_step,
        'hold', g.hold, 'priority', g.priority, 'queue', g.queue, 'fsm', g.fsm, 'version', g.fsm_version,
        'partition_key', g.partition_key, 'unique_key', encode(g.unique_key, 'escape'), 'unique_scope', g.unique_scope,
        'parent_id', g.parent_id, 'barrier', g.barrier)
        || jsonb_build_object(
        'children_total', g.children_total, 'children_pending', g.children_pending, 'wake_on_failure', g.wake_on_failure,
        'inbox', g.inbox, 'last_error', left(g.last_error, 200),
        'state', jsonb_hash_extended(g.state, 0), 'result', jsonb_hash_extended(g.result, 0))
$$;

create function durable_audit.told(s durable.signals) returns jsonb language sql stable as $$
    select jsonb_build_object(
        'id', s.id, 'target_id', s.target_id, 'name', s.name, 'dedup_key', s.dedup_key,
        'consumed_at', extract(epoch from s.consumed_at))
$$;

create function durable_audit.record_instance() returns trigger language plpgsql as $$
declare
    moment timestamptz := clock_timestamp();  -- before the insert's snapshot is taken
begin
    insert into durable_audit.change (at, source, instance, before, after)
    values (moment, 'i', case when tg_op = 'DELETE' then old.id else new.id end,
            case when tg_op <> 'INSERT' then durable_audit.told(old) end,
            case when tg_op <> 'DELETE' then durable_audit.told(new) end);
    return null;
end $$;

create function durable_audit.record_signal() returns trigger language plpgsql as $$
declare
    moment timestamptz := clock_timestamp();  -- before the insert's snapshot is taken
begin
    insert into durable_audit.change (at, source, instance, before, after)
    values (moment, 's', case when tg_op = 'DELETE' then old.target_id else new.target_id end,
            case when tg_op <> 'INSERT' then durable_audit.told(old) end,
            case when tg_op <> 'DELETE' then durable_audit.told(new) end);
    return null;
end $$;

create trigger durable_audit after insert or update or delete on durable.gen_durable
    for each row execute function durable_audit.record_instance();
create trigger durable_audit after insert or update or delete on durable.signals
    for each row execute function durable_audit.record_signal();
