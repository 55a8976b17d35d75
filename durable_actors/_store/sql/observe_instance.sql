-- observe_instance: details of an instance: its inbox, its children, the owner of its key, its deadlines. For operators.
-- params   $1 id bigint
-- returns  one row: seconds until it is eligible, until its lease ends, until its deadline · awaits text[] · await_step ·
--          children pending, total · {name: unread signals} of the first 10,000 · {status: children} of all barriers ·
--          id and owner of the running sibling of its key · id of the first due sibling of its key; shelved ones have given up
--          their place
-- locks    none
-- index    gen_durable_pkey, signals_unread, gen_durable_parent, gen_durable_key_executing, gen_durable_key
-- cost     linear in the inbox (bounded) and the children
select (extract(epoch from g.eligible_at) - extract(epoch from now()))::float8,
       (extract(epoch from g.lease_expires_at) - extract(epoch from now()))::float8,
       (extract(epoch from g.await_deadline) - extract(epoch from now()))::float8,
       g.awaits, g.await_step, g.children_pending, g.children_total,
       (select jsonb_object_agg(n.name, n.unread) from (
           select s.name, count(*) as unread from (
               select i.name from durable.signals i where i.target_id = g.id and i.consumed_at is null
                order by i.id limit 10000) s
            group by s.name) n),
       (select jsonb_object_agg(c.status, c.children) from (
           select y.status::text, count(*) as children from durable.gen_durable y where y.parent_id = g.id
            group by y.status) c),
       x.id, x.locked_by, d.id
  from durable.gen_durable g
  left join lateral (
      select y.id, y.locked_by from durable.gen_durable y
       where y.partition_key = g.partition_key and y.status = 'executing' and y.id <> g.id limit 1) x on true
  left join lateral (
      select y.id from durable.gen_durable y
       where y.partition_key = g.partition_key and y.status = 'runnable' and y.eligible_at <= now()
         and (y.hold <> 2 or y.id = g.id)
       order by y.priority, y.eligible_at, y.id limit 1) d on true
 where g.id = $1::bigint
