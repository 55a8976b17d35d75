-- recount_barriers: correct the counts of barriers, and open those that are complete. The engine counts exactly; SQL by hand may not.
-- params   $1 after this id bigint · $2 how many rows to look at int · of the receipts: $3 by text · $4 reason text ·
--          $5 correct them, or only look boolean
-- returns  first the last id that was looked at, or null at the end; then the ids of the wrong ones
-- moves    child_ended · joined · recounted
-- locks    the parents, FOR NO KEY UPDATE SKIP LOCKED: a row that is locked is moving
-- index    gen_durable_pkey, gen_durable_parent, journal_pkey
-- fence    the rev that the snapshot has: the end of a child and its count at the barrier are one transaction
-- keeps    I11 barriers release exactly once. How many children a barrier needs is in the record of its spawn, or in a snapshot that
--          retention wrote since; without one, a barrier that waits for more children than live is corrected, and one that waits for fewer
--          may have a quorum.
with page as materialized (
    select g.id, g.rev, g.visit, g.status::text as status from durable.gen_durable g where g.id > $1::bigint order by g.id limit $2::int
), counted as materialized (
    select p.id, p.rev, c.live, c.ended, c.failed,
           (select coalesce(j.data ->> 'needed', j.data ->> 'children_pending')::int from durable.journal j
             where j.instance_id = p.id and ((j.kind = 'spawned' and j.visit = p.visit - 1)
                                             or (j.kind = 'snapshot' and j.visit = p.visit and j.data ? 'needed'))
             order by j.rev desc limit 1) as needed,
           (select coalesce(j.data ->> 'pending', j.data ->> 'children_pending', j.data -> 'row' ->> 'children_pending')::int
              from durable.journal j
             where j.instance_id = p.id and j.kind in ('spawned', 'child_ended', 'recounted', 'snapshot')
             order by j.rev desc limit 1) as recorded
      from page p
     cross join lateral (
         select count(*) filter (where y.finished_at is null)::int as live, count(*) filter (where y.finished_at is not null)::int as ended,
                coalesce(bool_or(y.status::text in ('failed', 'cancelled')), false) as failed
           from durable.gen_durable y where y.parent_id = p.id and y.barrier = p.visit) c
     where p.status = 'awaiting_children'
), wrong as materialized (
    select g.id, g.step, c.recorded, c.failed, d.pending, d.pending = 0 or (g.wake_on_failure and c.failed) as opens
      from durable.gen_durable g
      join counted c on c.id = g.id and c.rev = g.rev
     cross join lateral (select greatest(coalesce(c.needed - c.ended, least(g.children_pending, c.live)), 0) as pending) d
     where g.status::text = 'awaiting_children'
       and (d.pending <> g.children_pending or d.pending = 0 or (g.wake_on_failure and c.failed))
     order by g.id for no key update of g skip locked
), corrected as (
    update durable.gen_durable g
       set children_pending = w.pending,
           status = case when w.opens then 'runnable' else g.status end,
           hold = case when w.opens then durable.hold_of(g.request) else g.hold end,
           eligible_at = case when w.opens then durable.now() else g.eligible_at end,
           step = case when w.opens then coalesce(g.await_step, g.step) else g.step end,
           await_step = case when w.opens then null else g.await_step end,
           await_deadline = case when w.opens then null else g.await_deadline end,
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from (select w.*, y.children_pending as before from wrong w join durable.gen_durable y on y.id = w.id) w
     where g.id = w.id and $5::boolean
    returning g.id, case when g.journal >= 3 then durable.note(
                  g.id, g.rev, case when w.opens then 'joined' when w.pending < w.before then 'child_ended' else 'recounted' end,
                  w.step, case when w.opens then g.step end, g.visit, g.attempt, g.round, further => jsonb_build_object(
                      'count', (coalesce(w.recorded, w.before) - w.pending) * case when w.pending > w.before then -1 else 1 end,
                      'pending', w.pending, 'failed', w.failed)) end,
              case when w.opens and g.cancel_rest then durable.cascade(g.id, g.visit, null) end
), told as (
    insert into durable.receipts (command, scope, target, by, reason, result)
    select 'recover', 'instance', c.id::text, $3::text, $4::text, to_jsonb('recounted'::text) from corrected c
)
select case when count(*) = $2::int then max(p.id) end from page p
union all
select w.id from wrong w
