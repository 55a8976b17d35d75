-- count_versions: how many instances need each step of each machine and version. For operators and deploy gates.
-- params   none
-- returns  machine, version, step · how many live instances stand there or go there next · of how many it is the first such step (one that waits for
--          a person may go to several) · how many failed there, which a retry would run · when the oldest live one was inserted
-- locks    none
-- index    none: READS THE WHOLE TABLE, for no index holds parks without a deadline. The verbs that use it say so; nothing of the engine does.
select g.fsm, g.fsm_version, n.step, count(*) filter (where g.finished_at is null),
       count(*) filter (where g.finished_at is null and n.place = 1), count(*) filter (where g.status = 'failed'),
       min(g.inserted_at) filter (where g.finished_at is null)
  from durable.gen_durable g
 cross join lateral (
     select u.step, u.place from unnest(
         case when g.status = 'awaiting_signal' and g.manual is not null
              then array[coalesce(g.manual ->> 'then', g.step), g.manual ->> 'on_reject', g.manual ->> 'on_timeout']
              when g.status in ('awaiting_signal', 'awaiting_children') then array[coalesce(g.await_step, g.step)]
              else array[g.step] end) with ordinality u(step, place)
      where u.step is not null) n
 where g.finished_at is null or g.status = 'failed'
 group by g.fsm, g.fsm_version, n.step
 order by g.fsm, g.fsm_version, n.step
