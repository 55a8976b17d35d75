-- wake_lost_waits: wake instances that wait for a signal which is in their inbox. None is lost by the engine; SQL by hand may lose one.
-- params   $1 after this id bigint · $2 how many rows to look at int · of the receipts: $3 by text · $4 reason text ·
--          $5 wake them, or only look boolean
-- returns  first the last id that was looked at, or null at the end; then the ids of the lost ones
-- moves    woken
-- locks    FOR NO KEY UPDATE SKIP LOCKED: a row that is locked is moving
-- index    gen_durable_pkey, signals_inbox
-- fence    the rev that the snapshot has: a signal and the wake that it causes are one transaction
-- keeps    I7 no wake-up is lost. A signal that is older than the wait was handed to the step, which kept it and waits for another one.
with page as materialized (
    select g.id, g.rev, g.status::text as status from durable.gen_durable g where g.id > $1::bigint order by g.id limit $2::int
), lost as materialized (
    select g.id, g.step from durable.gen_durable g
      join page p on p.id = g.id and p.rev = g.rev
     where p.status = 'awaiting_signal' and g.status::text = 'awaiting_signal'
       and exists (select 1 from durable.signals s
                    where s.target_id = g.id and s.name = any (g.awaits) and s.consumed_at is null and s.inserted_at >= g.eligible_at)
     order by g.id for no key update of g skip locked
), woken as (
    update durable.gen_durable g
       set status = 'runnable', hold = durable.hold_of(g.request), eligible_at = durable.now(), step = coalesce(g.await_step, g.step), await_step = null,
           await_deadline = null, inbox = true, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from lost w
     where g.id = w.id and $5::boolean
    returning g.id, case when g.journal >= 3 then durable.note(g.id, g.rev, 'woken', w.step, g.step, g.visit, g.attempt, g.round) end
), told as (
    insert into durable.receipts (command, scope, target, by, reason, result)
    select 'recover', 'instance', w.id::text, $3::text, $4::text, to_jsonb('woken'::text) from woken w
)
select case when count(*) = $2::int then max(p.id) end from page p
union all
select l.id from lost l
