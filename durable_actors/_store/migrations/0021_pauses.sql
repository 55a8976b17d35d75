-- Paused queues.

-- No row: nothing is paused. Few rows, which every pick of a queue looks up by the primary key.
create table durable.pauses (
    queue       text not null,
    fsm         text not null default '',                     -- of this machine only; '': the whole queue
    until       timestamptz,                                  -- null: until somebody resumes it
    at          timestamptz not null default durable.now(),
    by          text,
    reason      text,
    primary key (queue, fsm)
);

comment on table durable.pauses is 'durable_actors: queues from which nothing is picked';
