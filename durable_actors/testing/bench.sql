-- What a bench adds to its database, once per template: a clock that can be advanced, and a record of every signal.
-- Leases stay on the server's own clock, pg_catalog.now(): nothing that runs loses its claim when the clock is advanced.

create table durable.bench_clock (
    one     boolean primary key default true check (one),
    ahead   interval not null default '0' check (ahead >= '0'),  -- advance adds to it
    stopped timestamptz                                          -- while a drain runs: the server's time when it began
);
insert into durable.bench_clock default values;

create or replace function durable.now() returns timestamptz language sql stable parallel safe as
    $$ select coalesce(c.stopped, pg_catalog.now()) + c.ahead from durable.bench_clock c $$;

-- The inbox of an instance is deleted when it is done; a test may ask what was sent to it all the same.
create table durable.bench_signals (
    id        bigint primary key,
    target_id bigint not null,
    name      text not null,
    payload   jsonb not null,
    dedup_key text
);
create function durable.bench_note_signal() returns trigger language plpgsql as $$
begin
    insert into durable.bench_signals values (new.id, new.target_id, new.name, new.payload, new.dedup_key);
    return null;
end $$;
create trigger bench_note_signal after insert on durable.signals
    for each row execute function durable.bench_note_signal();
