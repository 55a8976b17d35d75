-- cancel_children: cancel some of the children that are to be cancelled (durable.cascades), and forget those cascades that are done.
-- params   $1 how many cascades int · $2 how many children of each int
-- returns  what happened: "ended" child, queue, its partition key · "entered" child that compensates, queue, its partition key ·
--          "asked" child that runs · "opened" parent, queue, whose barrier this has opened · "looked" at how many cascades · "rests" a cascade, until its next lap
-- moves    cancelled · compensating · unfit · child_ended · joined · requested
-- locks    never waits. The cascades, FOR UPDATE SKIP LOCKED: any number of nodes work on different ones. Parents that wait for such a
--          child, then the children, FOR NO KEY UPDATE SKIP LOCKED in id order: one that is locked, or whose parent is, is left for
--          the next lap, half a second later
-- index    cascades_next, cascades_pkey, gen_durable_parent, gen_durable_pkey, compensations_pkey
-- keeps    I11 barriers release exactly once. What does not run ends, or enters the step that compensates; what runs is asked, and its node
--          ends it. A child that was asked already, or compensates, is passed by. The cascade goes on with the children of a
--          child: whoever ends the child writes it. Of a child that this ends it is written here, unless it has no live child: that
--          is certain if its row is the one that the snapshot has.
-- plan     a page of children is sorted by id: the index has them by barrier. 10,000 children are read in 5 ms
with work as materialized (
    select c.id, c.parent_id, c.barrier, c.up_to, c.after, c.missed, c.request from durable.cascades c
     where c.next_at <= clock_timestamp()
     order by c.next_at, c.id limit $1::int for update skip locked
), page as materialized (
    select w.id as cascade, w.request, p.id, p.rev, p.lives
      from work w
     cross join lateral (
        select y.id, y.rev, y.finished_at is null as lives from durable.gen_durable y
         where y.parent_id = w.parent_id and y.id > w.after and y.id <= w.up_to and (w.barrier is null or y.barrier = w.barrier)
         order by y.id limit $2::int) p
), parents as materialized (
    select p.id from durable.gen_durable p
     where p.id = any (array(select w.parent_id from work w)) and p.id <> all (array(select y.id from page y))
       and p.status::text = 'awaiting_children'
     order by p.id for no key update skip locked
), locked as materialized (
    select y.id, y.queue, y.partition_key, y.status = 'executing' as runs, p.request, y.rev <> p.rev as moved,
           y.cancellation is null and (y.status <> 'executing' or not durable.asked_to_cancel(y.request)
                                       or not durable.asked_for_children(y.request)) as wanted,
           durable.asked_to_cancel(y.request) as asked,
           case when octet_length(coalesce(y.partition_key, '')) <= 2000
                then (select c.step from durable.compensations c where c.fsm = y.fsm and c.fsm_version = y.fsm_version) end as undo
      from page p
      join durable.gen_durable y on y.id = p.id
     where y.finished_at is null
       and (y.barrier is null or y.parent_id = any (array(select q.id from parents q))
            or not exists (select 1 from durable.gen_durable q
                            where q.id = y.parent_id and q.visit = y.barrier and q.status::text = 'awaiting_children'))
     order by y.id for no key update of y skip locked
), chosen as materialized (
    select distinct on (l.id) l.* from locked l where l.wanted order by l.id
), asked as (
    update durable.gen_durable g
       set request = case when c.asked then g.request || '{"children": "cancel"}'
                          else c.request || jsonb_strip_nulls(jsonb_build_object('on_cancel', c.undo)) end, updated_at = durable.now()
      from chosen c
     where g.id = c.id and c.runs
    returning g.id, g.queue
), entered as materialized (
    select c.id, c.partition_key, durable.compensate(c.id, c.request, c.undo) as queue from chosen c where not c.runs and c.undo is not null
), ended as (
    update durable.gen_durable g
       set status = 'cancelled', finished_at = durable.now(), hold = 0, last_error = c.request ->> 'reason', error_type = null, traceback = null,
           locked_by = null, lease_expires_at = null, claim_id = null, claim_token_hash = null, await_step = null, await_deadline = null,
           children_pending = 0, wake_on_failure = false, request = c.request,
           manual = case when g.manual -> 'decision' is not null then g.manual end,
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from chosen c
     where g.id = c.id and not c.runs and c.undo is null
    returning g.id, g.queue, g.partition_key, g.parent_id, durable.count_ended(g.parent_id, g.barrier) as opened,
              case when g.journal >= 2 then durable.note_cancelled(g.id, g.rev, g.step, g.visit, g.attempt, g.round, g.request, g.last_error) end,
              case when c.moved or exists (select 1 from durable.gen_durable y where y.parent_id = g.id and y.finished_at is null)
                   then durable.cascade(g.id, null, g.request) end
), seen as materialized (
    select w.id, count(p.id)::int as children, max(p.id) as last,
           least(w.missed, min(p.id) filter (where p.lives and p.id not in (select l.id from locked l))) as missing
      from work w left join page p on p.cascade = w.id
     group by w.id, w.missed
), over as (
    delete from durable.cascades c using seen s where c.id = s.id and s.children < $2::int and s.missing is null
), goes_on as (
    update durable.cascades c
       set next_at = clock_timestamp() + case when s.children < $2::int then interval '0.5 s' else '0' end,
           after = case when s.children < $2::int then s.missing - 1 else s.last end,
           missed = case when s.children >= $2::int then s.missing end
      from seen s
     where c.id = s.id and (s.children >= $2::int or s.missing is not null)
)
select 'ended', e.id, e.queue, e.partition_key from ended e
union all
select 'entered', n.id, n.queue, n.partition_key from entered n
union all
select 'asked', a.id, a.queue, null from asked a
union all
select 'opened', e.parent_id, e.opened, null from ended e where e.opened is not null
union all
select 'looked', count(*), null, null from work w
union all
select 'rests', s.id, null, null from seen s where s.children < $2::int and s.missing is not null
