-- Signals wake, deadlines fire, barriers open: columns, indexes, and the function that any language can call.

alter table durable.gen_durable
    add column inbox           boolean not null default false,  -- a signal was sent to it: its inbox is worth a look
    add column barrier         bigint,                          -- of a child: the visit of its parent that waits for it
    add column children_total  int not null default 0,          -- of a parent: children of its current barrier
    add column wake_on_failure boolean not null default false,  -- of a parent: its barrier opens on the first failure
    add column child_uid       uuid;                            -- identity of what a step started: a re-run finds it

create unique index gen_durable_child_uid on durable.gen_durable (child_uid) where child_uid is not null;

-- A barrier's children in spawn order.
drop index durable.gen_durable_parent;
create index gen_durable_parent on durable.gen_durable (parent_id, barrier, id) where parent_id is not null;

-- Deadlines of one queue, soonest first: a feeder sleeps no longer than to the first of them.
drop index durable.gen_durable_deadline;
create index gen_durable_deadline on durable.gen_durable (queue, await_deadline)
    where status in ('awaiting_signal', 'awaiting_children') and await_deadline is not null;

-- The unread signals of an instance in order of arrival, whatever their names.
create index signals_unread on durable.signals (target_id, id) where consumed_at is null;

-- Drop the inbox of an instance that has just ended. Called by the statement that ends it, for its own row: a function
-- that is volatile has a newer snapshot than that statement, and so sees a signal that was committed while the statement
-- waited for the row's lock. (A delete in the statement itself would leave it.)
create function durable.drop_inbox(target bigint) returns void language plpgsql volatile as $$
begin
    delete from durable.signals s where s.target_id = target;
end $$;

-- Deliver signals: put each into its target's inbox and wake the target if it awaits that name. Atomic, and free of
-- lost wake-ups: the target's row is locked first, by id alone, whatever its status. Then every statement has a new
-- snapshot: if the target was just parked, that is seen; if it is being parked, its park waits for us, and its recheck,
-- the park's second statement, sees our signal.
-- A target is an id, or (null and) a unique key, which addresses the instance that occupies it.
-- outcome: sent · duplicate (the dedup key was seen before, also when that signal was consumed) · no_target (terminal or
-- missing; nothing was written)
create function durable.send_signals(targets bigint[], keys bytea[], names text[], payloads jsonb[], dedups text[])
returns table (ord bigint, target bigint, outcome text, queue text, woken boolean)
language plpgsql volatile as $$
declare
    resolved bigint[];
begin
    resolved := array(
        select coalesce(u.target, k.id)
          from unnest(targets, keys) with ordinality u(target, key, o)
          left join lateral (
              select g.id from durable.gen_durable g where u.target is null and g.unique_guard = u.key) k on true
         order by u.o);
    perform 1 from durable.gen_durable g where g.id = any (resolved) order by g.id for no key update;
    return query
    with input as materialized (
        select u.o, g.id, u.name, u.payload, u.dedup, g.queue, g.status
          from unnest(resolved, names, payloads, dedups) with ordinality u(target, name, payload, dedup, o)
          left join durable.gen_durable g on g.id = u.target and g.status not in ('done', 'failed')
    ), sent as (
        insert into durable.signals as s (target_id, name, payload, dedup_key)
        select i.id, i.name, coalesce(i.payload, 'null'), i.dedup from input i where i.id is not null order by i.o
        on conflict (target_id, dedup_key) where dedup_key is not null do nothing
        returning s.id as signal_id, s.target_id, s.name, s.dedup_key
    ), wake as (
        update durable.gen_durable g
           set inbox = true,
               status = case when w.hit then 'runnable' else g.status end,
               eligible_at = case when w.hit then now() else g.eligible_at end,
               step = case when w.hit then coalesce(g.await_step, g.step) else g.step end,
               await_step = case when w.hit then null else g.await_step end,
               await_deadline = case when w.hit then null else g.await_deadline end,
               rev = g.rev + case when w.hit then 1 else 0 end,
               updated_at = now()
          from (select b.target_id,
                       (select y.status = 'awaiting_signal' and y.awaits && array_agg(b.name)
                          from durable.gen_durable y where y.id = b.target_id) as hit
                  from sent b group by b.target_id) w
         where g.id = w.target_id and (w.hit or not g.inbox)
        returning g.id, w.hit
    ), fresh as (
        -- Of several with one new dedup key in one call the first was sent.
        select i.o, row_number() over (partition by i.id, i.dedup order by i.o) as nth,
               exists (select 1 from sent b where b.target_id = i.id and b.dedup_key = i.dedup) as is_new
          from input i where i.dedup is not null
    )
    select i.o, i.id,
           case when i.id is null then 'no_target'
                when i.dedup is null or (f.is_new and f.nth = 1) then 'sent'
                else 'duplicate' end,
           i.queue, coalesce(k.hit, false)
      from input i
      left join fresh f on f.o = i.o
      left join wake k on k.id = i.id
     order by i.o;
end $$;

comment on function durable.send_signals is 'durable_actors: deliver signals; callable from any language';

-- One signal, for psql and for other languages:
--   select durable.signal(42, 'payment_confirmed', '{"amount": 100}', 'evt-7');
--   select durable.signal('order:42', 'payment_confirmed');
create function durable.signal(target bigint, name text, payload jsonb default '{}', dedup_key text default null)
returns text language sql volatile as $$
    select outcome from durable.send_signals(array[target], array[null::bytea], array[name], array[payload], array[dedup_key])
$$;

create function durable.signal(unique_key text, name text, payload jsonb default '{}', dedup_key text default null)
returns text language sql volatile as $$
    select outcome from durable.send_signals(
        array[null::bigint], array[convert_to(unique_key, 'UTF8')], array[name], array[payload], array[dedup_key])
$$;
