-- cancel_instance: cancel an instance that has not ended, or ask the node that runs it to. A command.
-- params   $1 id bigint; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb;
--          $6 force boolean: do not ask, take the claim away; do not compensate any longer · $7 children boolean: cancel them, too
-- returns  the receipt's result: "cancelled", or "requested" if a step runs or it compensates; nothing if it has ended, or compensates already
--          and this is not by force. Then the partition key of one that gave up its place, whose siblings the caller promotes; its parent
--          and that one's queue if this has opened the parent's barrier; its own queue if it is offered, at the step that compensates
-- moves    cancelled · compensating · unfit · child_ended · joined · requested
-- locks    its row, then its parent's: the order of every commit
-- index    gen_durable_pkey, compensations_pkey, receipts_once
-- fence    a claim that this ends has its id cleared: its owner can commit nothing any more
-- keeps    inbox, awaits, handed signals and dedup keys, as a failure does: a retry finds them. I11 barriers release exactly once: what
--          the parent counts derives from the row that this statement ends. Effect and receipt are one statement, also in a savepoint.
--          A step that runs and was asked may still be done; any other outcome is refused (commit_outcomes, commit_parks, lock_parent),
--          and whoever ends its claim ends the instance (release_claims, crash_claims, reap_claims), or lets it compensate. The step that
--          compensates is looked up here, and is part of the request. Its children are cancelled by others (cancel_children).
with target as materialized (
    select y.id, y.partition_key, y.status = 'executing' and not $6::boolean as runs, c.step as undo,
           jsonb_strip_nulls(jsonb_build_object(
               'kind', 'cancel', 'by', $2::text, 'reason', $3::text, 'at', durable.now(), 'key', $4::text, 'on_cancel', c.step,
               'children', case when $7::boolean or (durable.asked_to_cancel(y.request) and durable.asked_for_children(y.request))
                                then 'cancel' end))
           || jsonb_build_object('metadata', $5::jsonb) as request
      from durable.gen_durable y
      left join durable.compensations c on c.fsm = y.fsm and c.fsm_version = y.fsm_version and y.cancellation is null
                                           and octet_length(coalesce(y.partition_key, '')) <= 2000
     where y.id = $1::bigint and y.status in ('runnable', 'executing', 'awaiting_signal', 'awaiting_children')
       and (y.cancellation is null or y.cancellation ? 'upstream' or durable.is_dropped(y.cancellation, y.visit) or $6::boolean)
       for no key update of y
), entered as materialized (
    select t.id, t.partition_key, durable.compensate(t.id, t.request, t.undo) as queue from target t where not t.runs and t.undo is not null
), ended as (
    update durable.gen_durable g
       set status = 'cancelled', finished_at = durable.now(), hold = 0, last_error = coalesce($3::text, g.cancellation ->> 'reason'),
           error_type = null, traceback = null,
           locked_by = null, lease_expires_at = null, claim_id = null, claim_token_hash = null, await_step = null, await_deadline = null,
           children_pending = 0, wake_on_failure = false, request = t.request,
           manual = case when g.manual -> 'decision' is not null then g.manual end,  -- an open boundary ends, a decision stays for a retry
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from target t
     where g.id = t.id and not t.runs and t.undo is null
    returning g.id, g.partition_key, g.parent_id, durable.count_ended(g.parent_id, g.barrier) as opened,
              case when durable.asked_for_children(g.request) then durable.cascade(g.id, null, g.request) end,
              case when g.journal >= 2 then durable.note_cancelled(g.id, g.rev, g.step, g.visit, g.attempt, g.round, g.request, g.last_error) end
), asked as (
    update durable.gen_durable g set request = t.request, updated_at = durable.now()
      from target t
     where g.id = t.id and t.runs
    returning g.id
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'cancel', 'instance', d.id::text, $2::text, $3::text, $4::text, $5::jsonb, to_jsonb(d.said)
  from (select e.id, 'cancelled'::text as said from ended e
        union all
        select a.id, 'requested' from asked a
        union all
        select n.id, 'requested' from entered n where n.queue is not null) d
returning r.result, coalesce((select e.partition_key from ended e), (select n.partition_key from entered n)),
          (select case when e.opened is not null then e.parent_id end from ended e), (select e.opened from ended e),
          (select n.queue from entered n)
