-- observe_instances: instances, and what each waits for: signals, children, siblings of its key, deadlines. For operators and explain.
-- params   $1 id bigint[] · $2 bool: with state, result and errors; they are null otherwise · $3 levels int: of those that wait for
--          children, or for what they come after, also the first three of those, and theirs, so many levels deep
-- returns  read.Instance (as read_instances) and observe.InstanceDetails: seconds until it is eligible, until its lease ends, until its
--          deadline · awaits text[] · await_step · children pending, total · {name: unread signals} of the first 10,000 ·
--          {status: children} of all barriers · id and owner of the running sibling of its key · the due siblings of its key that go first:
--          of each step the first one, among the first 10,000 · the present time · rev · offered, due (the pick's own
--          predicates) · shelved_step · await_deadline · journal · of one that is parked: awaited signals that came after it parked, and how
--          many children its barrier has, and has alive · ids of the first three children that it waits for · the last five receipts ·
--          the definition that it was started with · another one that ran a step, among its last 20 records ·
--          the pauses of its queue and of its machine there · whether children of it are being cancelled · for how many it waits that it
--          comes after, and id, key and status of the first three · its fair key, and how many due rows of that go first, of 1,000 at most
--          · of one that uses limits: the one that it waits for, or would wait for longest, as durable.judge_limits decides it
-- locks    none
-- index    gen_durable_pkey, signals_unread, signals_inbox, gen_durable_parent, gen_durable_key_executing, gen_durable_key, receipts_target,
--          journal_pkey, pauses_pkey, cascades_parent, graph_pkey, gen_durable_fair, limits_pkey, limit_waits_pkey,
--          limit_keys_pkey, gen_durable_slots, gen_durable_throttled, kept_slots_key
-- cost     linear in the inbox and the siblings (both bounded), and in the children
with recursive wanted(id, level) as (
    select u.id, 0 from unnest($1::bigint[]) u(id)
    union all
    select c.id, w.level + 1
      from wanted w
      join durable.gen_durable p on p.id = w.id and (p.status::text = 'awaiting_children' or p.hold = 5)
     cross join lateral (
        (select y.id from durable.gen_durable y
          where p.status::text = 'awaiting_children' and y.parent_id = p.id and y.barrier = p.visit and y.finished_at is null order by y.id limit 3)
        union all
        (select e.id from durable.graph s cross join lateral unnest(s.needs) n(id) join durable.graph e on e.id = n.id and s.id = any (e.owed)
          where p.hold = 5 and s.id = p.id order by e.id limit 3)) c
     where w.level < $3::int
)
select g.id, g.fsm, g.fsm_version, g.step, g.status, g.queue, g.priority, g.attempt, g.crashes, g.visit,
       case when $2::bool then g.state end, case when $2::bool then g.result end, case when $2::bool then g.last_error end,
       g.partition_key, g.unique_key, g.parent_id, g.locked_by, g.eligible_at, g.lease_expires_at,
       g.inserted_at, g.updated_at, g.finished_at, g.hold,
       g.interruptions, case when $2::bool then g.error_type end, case when $2::bool then g.traceback end, g.tags,
       case when $2::bool then g.meta end,
       case when $2::bool then g.manual else durable.shown_manual(g.manual) end, g.await_deadline, g.request, g.rerun_of,
       case when $2::bool or jsonb_typeof(g.cancellation) <> 'object' then g.cancellation else g.cancellation - 'reason' end,
       g.child_key, case when g.hold in (4, 5) and g.links in (1, 3) then (select e.waits from durable.graph e where e.id = g.id) end, g.max_attempts,
       (extract(epoch from g.eligible_at) - extract(epoch from durable.now()))::float8,
       (extract(epoch from g.lease_expires_at) - extract(epoch from pg_catalog.now()))::float8,
       (extract(epoch from g.await_deadline) - extract(epoch from durable.now()))::float8,
       g.awaits, g.await_step, g.children_pending, g.children_total,
       (select jsonb_object_agg(n.name, n.unread) from (
           select s.name, count(*) as unread from (
               select i.name from durable.signals i where i.target_id = g.id and i.consumed_at is null
                order by i.id limit 10000) s
            group by s.name) n),
       (select jsonb_object_agg(c.status, c.children) from (
           select y.status::text, count(*) as children from durable.gen_durable y where y.parent_id = g.id
            group by y.status) c),
       x.id, x.locked_by,
       (select jsonb_agg(jsonb_build_array(e.id, e.fsm, e.fsm_version, e.step, e.hold) order by e.priority, e.eligible_at, e.id) from (
           select distinct on (s.fsm, s.fsm_version, s.step) s.* from (
               select y.id, y.priority, y.eligible_at, y.fsm, y.fsm_version, y.step, y.hold from durable.gen_durable y
                where y.partition_key = g.partition_key and y.status = 'runnable' and durable.due(y.eligible_at)
                  and durable.keeps_place(y.hold) and (y.priority, y.eligible_at, y.id) < (g.priority, g.eligible_at, g.id)
                  and (y.queue, '') not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
                  and (y.queue, y.fsm) not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
                order by y.priority, y.eligible_at, y.id limit 10000) s
            order by s.fsm, s.fsm_version, s.step, s.priority, s.eligible_at, s.id) e
         where g.status = 'runnable'),
       durable.now(), g.rev, durable.offered(g.status, g.hold), durable.due(g.eligible_at), g.shelved_step, g.await_deadline, g.journal,
       case when g.status in ('awaiting_signal', 'awaiting_children') then jsonb_build_object(
           'lost', (select coalesce(jsonb_agg(distinct s.name), '[]') from durable.signals s
                     where g.status = 'awaiting_signal' and s.target_id = g.id and s.name = any (g.awaits) and s.consumed_at is null
                       and s.inserted_at >= g.eligible_at),
           'rows', (select count(*) from durable.gen_durable y where y.parent_id = g.id and y.barrier = g.visit),
           'live', (select count(*) from durable.gen_durable y
                     where y.parent_id = g.id and y.barrier = g.visit and y.finished_at is null)) end,
       (select jsonb_agg(m.id order by m.id) from (
           select y.id from durable.gen_durable y
            where g.status = 'awaiting_children' and y.parent_id = g.id and y.barrier = g.visit and y.finished_at is null
            order by y.id limit 3) m),
       (select jsonb_agg(jsonb_build_object('id', r.id, 'at', r.at, 'command', r.command, 'by', r.by, 'reason', r.reason) order by r.id desc)
          from (select c.id, c.at, c.command, c.by, c.reason from durable.receipts c
                 where c.scope = 'instance' and c.target = g.id::text order by c.id desc limit 5) r),
       encode(g.fingerprint, 'hex'),
       (select e.data ->> 'definition' from (
           select j.rev, j.data from durable.journal j where g.fingerprint is not null and j.instance_id = g.id order by j.rev desc limit 20) e
         where e.data ? 'definition' order by e.rev desc limit 1),
       (select jsonb_agg(jsonb_build_array(p.fsm, p.until, p.at, p.by, p.reason) order by p.fsm)
          from durable.pauses p where p.queue = g.queue and p.fsm in ('', g.fsm) and durable.lasts(p.until)),
       exists (select 1 from durable.cascades c where c.parent_id = g.id),
       (select jsonb_build_array(s.waits, (
            select coalesce(jsonb_agg(jsonb_build_array(u.id, u.child_key, u.status) order by u.id), '[]') from (
                select y.id, y.child_key, y.status
                  from unnest(s.needs) n(id)
                  join durable.graph e on e.id = n.id and s.id = any (e.owed)
                  join durable.gen_durable y on y.id = n.id
                 order by y.id limit 3) u))
          from durable.graph s where g.hold in (4, 5) and g.links in (1, 3) and s.id = g.id),
       case when g.fair_key is not null then jsonb_build_array(g.fair_key, (
           select count(*) from (
               select 1 from durable.gen_durable y
                where durable.offered(g.status, g.hold) and durable.offered(y.status, y.hold) and y.queue = g.queue and y.priority = g.priority
                  and y.fair_key >= g.fair_key and y.fair_key is not null and durable.due(y.eligible_at)
                  and (y.fair_key, y.eligible_at, y.id) < (g.fair_key, g.eligible_at, g.id)
                order by y.fair_key, y.eligible_at, y.id limit 1000) e)) end,
       case when g.status = 'runnable' and g.hold in (0, 2, 3) and g.rate_limit is not null then (
           select jsonb_build_object(
               'name', b.key, 'known', b.known, 'slots', case when b.slot then b.slots end, 'ahead', b.ahead,
               'free', (b.wait < 0 or coalesce(g.cancellation ? 'upstream' or durable.is_dropped(g.cancellation, g.visit), false)) and (g.hold <> 3 or coalesce(w.next_at <= durable.now(), false)),
               'next_in', case when b.wait > 0 and b.wait < 1e8 then b.wait
                               else extract(epoch from w.next_at)::float8 - extract(epoch from durable.now())::float8 end,
               'next_at', case when b.wait > 0 and b.wait < 1e8 then durable.now() + make_interval(secs => b.wait) else w.next_at end,
               'blocked', b.blocked > 0, 'holders', (
                   select coalesce(jsonb_agg(h.id order by h.id), '[]') from (
                       select y.id from durable.holders(b.key) y(id) limit 3) h))
             from (select u.n, u.key, u.slot, l.name is not null as known, l.slots, e.id as ahead, t.blocked,
                          case when u.slot and o.keeps then case when c.blocked > 1e-6 then c.blocked else -1 end
                               when l.name is null then 1e9
                               when e.id is not null then 0
                               when u.slot then case when n.taken >= l.slots then 1e8 when c.blocked > 1e-6 then c.blocked else -1 end
                               when t.wait <= 1e-6 then -1 else t.wait end as wait
                     from durable.uses_of(g.rate_limit, g.weight) u
                     left join durable.limits l on l.name = split_part(u.key, ':', 1)
                     left join durable.limit_keys s on s.key = u.key
                    cross join lateral (
                       select coalesce(durable.spent(s.blocked, s.at, durable.now()), 0) as blocked) c
                    cross join lateral (
                       select exists (select 1 from durable.kept_slots y where y.instance_id = g.id and y.key = u.key) as keeps) o
                    cross join lateral (
                       select c.blocked, greatest(c.blocked, case when l.interval is null then 0 else
                              coalesce(durable.spent(s.tat, s.at, durable.now()), 0) + (least(u.weight, l.burst) - l.burst) * l.interval end) as wait) t
                     left join lateral (select count(*) as taken from (
                       select 1 from durable.holders(u.key) limit l.slots) x) n
                       on u.slot and l.slots is not null
                     left join lateral (
                       select y.id from durable.gen_durable y
                        where y.status = 'runnable' and y.hold = 3 and y.queue = g.queue and y.limited_by = u.key
                          and (y.priority, y.eligible_at, y.id) < (g.priority, g.eligible_at, g.id)
                        order by y.priority, y.eligible_at, y.id limit 1) e on true
                    order by wait desc, u.key is not distinct from g.limited_by desc, u.n limit 1) b
             left join durable.limit_waits w on w.key = coalesce(case when g.hold = 3 then g.limited_by end, b.key) and w.queue = g.queue) end
  from durable.gen_durable g
  left join lateral (
      select y.id, y.locked_by from durable.gen_durable y
       where y.partition_key = g.partition_key and y.status = 'executing' and y.id <> g.id limit 1) x on true
 where g.id = any (array(select w.id from wanted w))
 order by g.id
