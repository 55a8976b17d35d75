-- Retention: how long ended instances are kept, and what goes with a row that is deleted.

-- What `keep=` of a machine says, written by the engines that know the machine: whoever deletes need not know it. Few rows; a column
-- of each instance would cost every insert, and a changed `keep=` would not reach the rows that are there.
create table durable.keeps (
    fsm         text not null,
    fsm_version int not null,
    seconds     float8,                                       -- after the end; null: for ever
    primary key (fsm, fsm_version)
);

comment on table durable.keeps is 'durable_actors: how long ended instances of a machine are kept, where it says so itself';

-- The signals of a row that goes. A trigger instead of the foreign key: no index has all signals of an instance (a tombstone is in
-- signals_dedup, an unread one in signals_unread, and every other one is gone), so that the key read the whole table for every row that was
-- deleted, and it cost a look at the instance for every signal that was sent. Rows to which nothing was ever sent fire no trigger.
-- Nothing needs the key: who sends a signal locks its target first, and finds that it is gone.
alter table durable.signals drop constraint if exists signals_target_id_fkey;

-- drop_inbox (0003): by those two indexes. It read the whole table, too.
create or replace function durable.drop_inbox(target bigint) returns void language plpgsql volatile as $$
begin
    delete from durable.signals s where s.target_id = target and s.consumed_at is null;
    delete from durable.signals s where s.target_id = target and s.dedup_key is not null;
end $$;

create function durable.drop_inbox_of_deleted() returns trigger language plpgsql as $$
begin
    perform durable.drop_inbox(old.id);
    return null;
end $$;

create trigger gen_durable_deleted after delete on durable.gen_durable
    for each row when (old.inbox) execute function durable.drop_inbox_of_deleted();

-- `truncate durable.gen_durable`, which tests of applications use, empties the inboxes as before.
create function durable.drop_all_inboxes() returns trigger language plpgsql as $$
begin
    delete from durable.signals;  -- not "truncate": the same statement may do that already
    return null;
end $$;

create trigger gen_durable_truncated after truncate on durable.gen_durable
    for each statement execute function durable.drop_all_inboxes();

-- Delete what the journal has of these instances: records, and checkpoints of their replay. Returns how many records.
create function durable.forget(ids bigint[]) returns bigint language plpgsql volatile as $$
begin
    delete from durable.checkpoints c
     where c.thread = any (array(select x.head || 'run:' || u.id from unnest(ids) u(id), (values (''), ('head of ')) x(head)));
    return durable.forget_journal(ids);
end $$;
