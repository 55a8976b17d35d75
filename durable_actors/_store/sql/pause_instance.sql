-- pause_instance: let nothing pick an instance until it is resumed. A step that runs finishes first. A command.
-- params   $1 id bigint; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb
-- returns  the receipt's result: "paused", or "requested" if a step runs; nothing if it has ended, is paused, or is to be cancelled. Then the
--          partition key of one that was runnable, whose siblings the caller promotes
-- moves    paused
-- locks    its row
-- index    gen_durable_pkey, receipts_once
-- fence    none: a claim stays what it is, and its outcome is committed. Whoever makes the row runnable after this holds it, by
--          durable.hold_of(request): commits, releases, crashes, reaps, signals, deadlines, barriers. A commit that waits for this statement's
--          lock sees the request, too, because it reads the row again
-- keeps    its place in its partition key is given up (durable.keeps_place). Effect and receipt are one statement, also in a savepoint.
with target as materialized (
    select y.id from durable.gen_durable y
     where y.id = $1::bigint and y.status in ('runnable', 'executing', 'awaiting_signal', 'awaiting_children')
       and not durable.asked_to_pause(y.request) and not durable.asked_to_cancel(y.request)
       for no key update
), paused as (
    update durable.gen_durable g
       set hold = case when g.status = 'runnable' then 4 else g.hold end,
           request = jsonb_strip_nulls(jsonb_build_object('kind', 'pause', 'by', $2::text, 'reason', $3::text, 'at', durable.now())),
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from target t
     where g.id = t.id
    returning g.id, g.status, g.partition_key,
              case when g.journal >= 2 then durable.note(
                  g.id, g.rev, 'paused', g.step, null, g.visit, g.attempt, g.round, commander => $2::text,
                  further => jsonb_build_object('command', jsonb_strip_nulls(jsonb_build_object(
                      'type', 'pause', 'key', $4::text, 'reason', $3::text)) || jsonb_build_object('metadata', $5::jsonb))) end
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'pause', 'instance', p.id::text, $2::text, $3::text, $4::text, $5::jsonb,
       to_jsonb(case when p.status = 'executing' then 'requested'::text else 'paused' end)
  from paused p
returning r.result, (select case when p.status = 'runnable' then p.partition_key end from paused p)
