-- The instance table, its inbox, and what referees their races: constraints.
-- Written for schema "durable"; the migrator rewrites the qualifier when another one is configured.

create type durable.durable_status as enum
    ('runnable', 'executing', 'awaiting_signal', 'awaiting_children', 'done', 'failed');

-- One row per instance. The row is a checkpoint that is always current: execution reads nothing else.
-- Wide fixed-size columns come first, so that no byte is lost to alignment.
create table durable.gen_durable (
    id               bigint generated always as identity primary key,
    parent_id        bigint,                                  -- the instance that scheduled this one
    visit            bigint not null default 1,               -- +1 on every transition into a step; part of the fence
    rev              bigint not null default 0,               -- +1 per recorded transition
    eligible_at      timestamptz not null default now(),      -- not before
    lease_expires_at timestamptz,                             -- until when the claim is trusted; not indexed, so renewing is HOT
    await_deadline   timestamptz,                             -- when an await or a barrier gives up
    inserted_at      timestamptz not null default now(),
    updated_at       timestamptz not null default now(),
    finished_at      timestamptz,
    claim_id         uuid,                                    -- current or last claim; cleared by reap and release, kept by completion
    status           durable.durable_status not null default 'runnable',
    fsm_version      int not null default 1,
    attempt          int not null default 0,                  -- attempts of the current step; 0 after a transition
    crashes          int not null default 0,                  -- executions of the current step that ended without an outcome
    children_pending int not null default 0,                  -- children the barrier still waits for
    weight           int not null default 1,                  -- reserved for rate limits
    priority         smallint not null default 0,             -- lower goes first
    hold             smallint not null default 0,             -- why a runnable row is not offered to the pick:
                                                              -- 0 it is · 1 behind a sibling of its key · 2 shelved, machine unknown
    fsm              text not null,                           -- machine name; never imported, never evaluated
    step             text not null,                           -- current step
    queue            text not null default 'default',
    partition_key    text,                                    -- one running step per key
    rate_limit       text,                                    -- reserved for rate limits
    locked_by        text,                                    -- node and incarnation that hold the claim
    claim_token_hash bytea,                                   -- the token itself exists only at the worker
    awaits           text[],                                  -- signal names of the current await; kept until the outcome after it
    await_step       text,                                    -- step to enter on wake; null re-runs the same one
    last_error       text,
    unique_key       bytea,                                   -- verbatim
    unique_scope     durable.durable_status[] not null default '{}',
    -- Equal to the key while the status is in the scope, else null, which leaves the index. The scope is an
    -- enum array because a generated column must be immutable and enum -> text is only stable.
    unique_guard     bytea generated always as
        (case when unique_key is not null and status = any (unique_scope) then unique_key end) stored,
    state            jsonb not null default '{}',
    result           jsonb,

    -- Invalid states are uncommittable rather than checked for.
    -- "locked_by is not null" is how a fenced UPDATE asks for 'executing' without naming the status: the planner
    -- believes that almost no row is executing and would drive a batch from that index (270 instead of 50 µs a row).
    constraint gen_durable_claimed check
        (case when status = 'executing' then claim_id is not null and locked_by is not null and lease_expires_at is not null
              else locked_by is null and lease_expires_at is null end),
    constraint gen_durable_awaits check (status <> 'awaiting_signal' or awaits is not null),
    constraint gen_durable_finished check ((status in ('done', 'failed')) = (finished_at is not null)),
    constraint gen_durable_counts check (visit > 0 and attempt >= 0 and crashes >= 0 and children_pending >= 0
                                              and hold between 0 and 2),
    -- A scope that a row could leave and enter again would make a pick or a reap fail on the unique index:
    -- it is empty, or holds every live status.
    constraint gen_durable_scope check
        (unique_scope = '{}'
         or unique_scope @> '{runnable,executing,awaiting_signal,awaiting_children}'::durable.durable_status[])
) with (
    -- Room for new versions on the same page. Measured (2,000 executing rows of 10,000, state of 64 B / 1 kB):
    -- at 100, 28 / 5 % of in-place step commits were HOT; at 80, 81 / 59 %; at 70, 92 / 91 %; at 50, 98 / 100 %.
    fillfactor = 70,
    -- Every claim leaves a dead entry at the head of the pick index, and picks walk them until vacuum: 2.1 ms
    -- grew to 5.3 ms per 100-row pick within 60,000 claims. The default (20 % of the table) would let a table of
    -- a million finished rows gather 200,000 of them; 1 % plus 1,000 vacuums every few seconds under load.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    -- A vacuum that pauses (2 ms per 200 cost units by default) falls behind a busy queue; without pauses one of
    -- a 564 MB table took 0.48 s, most of its pages being all-visible.
    autovacuum_vacuum_cost_delay = 0,
    -- Statuses swing from "all runnable" to "all done" within minutes; plans must not rest on old figures.
    autovacuum_analyze_scale_factor = 0.05,
    -- Insert-only bursts are frozen by the vacuums above; this keeps index-only reads of finished rows cheap.
    autovacuum_vacuum_insert_scale_factor = 0.05
);

comment on table durable.gen_durable is 'durable_actors: one row per instance';

-- The pick: equality on queue, then exactly its order. Future rows lie behind the due ones of their priority.
-- Held rows are not in it, so a pick never walks 50,000 siblings of a busy key.
create index gen_durable_pick on durable.gen_durable (queue, priority, eligible_at, id)
    where status = 'runnable' and hold = 0;

-- Rows that a node met and whose machine or version it does not know; a node that does finds them here.
create index gen_durable_shelf on durable.gen_durable (queue, fsm, fsm_version, priority, eligible_at, id)
    where status = 'runnable' and hold = 2;

-- The reaper and the node views: who holds what. (locked_by), not the lease's end: with an index on
-- lease_expires_at 0 % of the heartbeats' updates are HOT, with this one 91 to 98 %.
create index gen_durable_executing on durable.gen_durable (locked_by)
    where status = 'executing';

-- The next sibling of a partition key, across queues, offered or held.
create index gen_durable_key on durable.gen_durable (partition_key, priority, eligible_at, id)
    where status = 'runnable' and partition_key is not null;

-- At most one running step per partition key, refereed by the index itself.
create unique index gen_durable_key_executing on durable.gen_durable (partition_key)
    where status = 'executing' and partition_key is not null;

-- Uniqueness among the statuses of each row's own scope; one index, so a batch insert is one statement.
create unique index gen_durable_unique on durable.gen_durable (unique_guard)
    where unique_guard is not null;

-- Await and barrier deadlines, soonest first; holds parked rows with a deadline only.
create index gen_durable_deadline on durable.gen_durable (await_deadline)
    where status in ('awaiting_signal', 'awaiting_children') and await_deadline is not null;

-- A parent's children.
create index gen_durable_parent on durable.gen_durable (parent_id, id)
    where parent_id is not null;

-- The newest instance that had a key (result and inspect address it after it left its scope).
create index gen_durable_key_history on durable.gen_durable (unique_key, id)
    where unique_key is not null;

-- The inbox. A consumed signal with a dedup key stays as a tombstone until its instance goes, so that a
-- redelivery is recognised; one without is deleted.
create table durable.signals (
    id          bigint generated always as identity primary key,
    target_id   bigint not null references durable.gen_durable (id) on delete cascade,
    inserted_at timestamptz not null default now(),
    consumed_at timestamptz,
    name        text not null,
    dedup_key   text,
    payload     jsonb not null default '{}'
) with (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

comment on table durable.signals is 'durable_actors: messages to instances';

create unique index signals_dedup on durable.signals (target_id, dedup_key)
    where dedup_key is not null;

-- Unread signals of one instance by name, in order of arrival.
create index signals_inbox on durable.signals (target_id, name, id)
    where consumed_at is null;

-- Who works here. A node's claims are trusted by their leases and by an advisory lock that its session holds; this
-- table only tells people, and other nodes, what each incarnation is.
create table durable.nodes (
    incarnation text primary key,                             -- equals locked_by of its claims
    node        text not null,
    started_at  timestamptz not null default now(),
    seen_at     timestamptz not null default now(),
    stopped_at  timestamptz,
    about       jsonb not null default '{}'                   -- queues, machines, versions, pid
) with (fillfactor = 70);

comment on table durable.nodes is 'durable_actors: engine processes';
