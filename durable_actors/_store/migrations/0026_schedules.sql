-- Schedules: what is to start when, and what became of each slot. Both tables are small, and only schedules read and write them.
create table durable.schedules (
    name          text primary key,
    rev           bigint not null default 1,                 -- counts every change: whoever turns a schedule compares and sets it
    spec          jsonb not null,                            -- when and how it fires: cron or every, tz, overlap, missed, …
    -- The instance of each slot, so that any node can insert it, also one that does not know the machine.
    fsm           text not null,
    fsm_version   int not null,
    step          text not null,
    state         jsonb not null,
    queue         text not null,
    priority      smallint not null,
    partition_key text,
    tags          text[],
    meta          jsonb,
    journal       smallint not null,
    fingerprint   bytea,
    max_attempts  int,
    fair_key      text,
    rate_limit    text,                                      -- the limits of its first step
    -- Who defined it.
    origin        text not null check (origin in ('code', 'api')),
    revisions     text[] not null default '{}',              -- of the code's definitions, newest last; empty: no code has it
    overridden    jsonb,                                     -- by, at, reason: an operator's definition replaces the code's
    disabled_at   timestamptz,                               -- no live node has it in its code any more
    paused        jsonb,                                     -- by, at, reason
    -- Where it stands.
    next_slot     timestamptz,                               -- the first slot that is not decided; null: it has no further one
    fire_at       timestamptz,                               -- the same, with its jitter
    last_slot     timestamptz,                               -- the last slot that is decided
    buffered      timestamptz,                               -- a slot that waits until the running instance has ended
    remaining     int,                                       -- how many slots may still fire; null: all
    created_at    timestamptz not null default durable.now(),
    changed_at    timestamptz not null default durable.now() -- of its definition
);

comment on table durable.schedules is 'durable_actors: what is started when';

-- One row per slot that was decided, or per run of skipped slots. Rows of a schedule that are old enough go with its next turn.
create table durable.schedule_log (
    id          bigint generated always as identity,
    name        text not null,
    slot        timestamptz not null,
    last_slot   timestamptz not null,                        -- of a run of skipped slots the last one, else the same
    slots       int,                                         -- how many; null: more than are counted
    outcome     text not null check (outcome in ('fired', 'skipped', 'buffered')),
    reason      text,                                        -- why it was skipped: overlap, missed, paused, queue_paused, changed
    kind        text,                                        -- of an instance: slot, caught_up, run_now, backfill
    instance_id bigint,
    at          timestamptz not null default durable.now(),
    primary key (name, id)
);

comment on table durable.schedule_log is 'durable_actors: what became of the slots of schedules';
