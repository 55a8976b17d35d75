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
     where c.thread = any (array(
        select x.head || 'run:' || u.id from unnest(ids) u(id), (values (''), ('head of '), ('snapshot of ')) x(head)));
    return durable.forget_journal(ids);
end $$;

-- The revision before which the records of a live instance may go; null: none. `told`: the projection of its "snapshot of run:ID".
create function durable.journal_cut(level smallint, rev bigint, moves bigint, told jsonb) returns bigint language sql immutable as $$
select case when level = 1 then rev - moves
            when level between 2 and 4 and told::text ~ '^[0-9]{1,18}$' then told::text::bigint end
$$;

-- Delete records of a live instance that lie far enough back, the newest of them first, so that at any time a snapshot follows what is missing.
-- Nothing is needed from before a snapshot. `checkpoints` has the last snapshot that retention wrote ("snapshot of run:ID") and, as its
-- projection, the one before: what lies before that one goes. A journal of failed attempts alone (level 1) is no history that could be
-- folded, and needs no snapshot.
-- Returns how many; null: somebody else is at it. Two at a time could delete from one history at two places, of which one is taken back.
create function durable.truncate_journal(space text, instance bigint, moves bigint, most int) returns bigint language plpgsql volatile as $$
declare
    cut bigint;
    gone bigint;
begin
    if not pg_try_advisory_xact_lock(hashtextextended(space || chr(3) || instance, 0)) then return null; end if;
    select u.cut into cut  -- a new statement: a fresh snapshot, taken after the lock
      from (select g.id, g.journal, durable.journal_cut(g.journal, g.rev, moves, c.projection) as cut
              from durable.gen_durable g
              left join durable.checkpoints c on c.thread = 'snapshot of run:' || g.id
             where g.id = instance and g.finished_at is null) u
     where u.journal = 1
        or exists (select 1 from durable.journal j where j.instance_id = u.id and j.rev = u.cut and j.kind = 'snapshot');
    perform set_config('durable_actors.journal_door', 'open', true);
    delete from durable.journal j
     where j.instance_id = instance and j.rev = any (array(
        select o.rev from durable.journal o where o.instance_id = instance and o.rev < cut order by o.rev desc limit most));
    get diagnostics gone = row_count;
    perform set_config('durable_actors.journal_door', '', true);
    return gone;
end $$;
