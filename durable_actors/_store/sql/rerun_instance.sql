-- rerun_instance: start a new instance from an old one, whatever became of that. A command.
-- params   $1 id bigint, of the old one; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text ·
--          $5 data jsonb; each may be null: $6 first step text · $7 state jsonb · $8 partition key text, if $9 · $9 bool: the partition key is
--          given, else it is that of the old one when it was started, as far as that is recorded, or its present one · $10 limits text or null, if
--          $11 · $11 bool: the limits of $6 are known, as the code of its machine says
-- returns  the receipt's result, which is the new id; nothing if there is no old one, or what is not given is not known: its first step is
--          recorded, or it has not left it; its first state is recorded ("full"), or no outcome can have changed it yet
-- moves    started
-- locks    the new row. The old one is only read: it may run, and its row may be locked
-- index    gen_durable_pkey, journal_pkey, receipts_once
-- keeps    the limits of its first step, as far as they are recorded and it begins there; its present ones, if it begins in its present step; else
--          those of the code;
--          machine, version, queue, priority, fair key, tags, meta, limit of attempts, journal level and definition of the old one. Not its unique key, which the old one
--          may occupy (nor the flag `inbox`, unless a schedule started it: then every step reads its slot); not its parent, whose barrier has counted its own. Row, record and receipt are one statement.
with old as materialized (
    select y.*, coalesce($6::text, s.first ->> 'step', case when y.visit = 1 then y.step end) as at_step,
           -- An outcome that ends an instance leaves the state as it is, and its claim's id in the row.
           coalesce($7::jsonb, s.first -> 'state', case
               when y.visit = 1 and y.round <= (y.finished_at is not null and y.claim_id is not null)::int then y.state end) as with_state,
           case when $9::bool then $8::text when s.first is not null then s.first ->> 'partition_key' else y.partition_key end as with_key,
           case when coalesce($6::text, s.first ->> 'step') = s.first ->> 'step' then s.first ->> 'rate_limit'
                when $11::bool and $6::text <> y.step then $10::text else coalesce(y.rate_limit, y.cancellation ->> 'rate_limit') end as with_limits
      from durable.gen_durable y
      left join lateral (
           select j.data -> 'row' as first from durable.journal j
            where j.instance_id = y.id and j.rev = 1 and j.kind = 'started') s on true
     where y.id = $1::bigint
), started as (
    insert into durable.gen_durable as g (
        fsm, fsm_version, step, state, queue, priority, weight, rate_limit, partition_key, tags, meta, journal, fingerprint, rerun_of, eligible_at, inbox,
        max_attempts, fair_key)
    select o.fsm, o.fsm_version, o.at_step, o.with_state, o.queue, o.priority, o.weight, o.with_limits, o.with_key, o.tags, o.meta, o.journal,
           o.fingerprint, o.id, durable.now(), coalesce(o.meta ? 'durable:schedule', false), o.max_attempts, o.fair_key
      from old o where o.at_step is not null and o.with_state is not null
    returning g.id, g.rerun_of, case when g.journal >= 2 then durable.note(
        g.id, 1, 'started', g.step, g.step, 1, 0, 0, commander => $2::text, further => jsonb_build_object(
            'row', jsonb_strip_nulls(jsonb_build_object(
                'fsm', g.fsm, 'fsm_version', g.fsm_version, 'step', g.step, 'queue', g.queue, 'priority', g.priority, 'journal', g.journal,
                'weight', nullif(g.weight, 1), 'rate_limit', g.rate_limit, 'eligible_at', g.eligible_at, 'partition_key', g.partition_key,
                'unique_scope', g.unique_scope, 'tags', g.tags, 'inserted_at', g.inserted_at, 'rerun_of', g.rerun_of, 'max_attempts', g.max_attempts, 'fair_key', g.fair_key,
                'fingerprint', chr(92) || 'x' || encode(g.fingerprint, 'hex')))
                || case when g.meta is null then '{}' else jsonb_build_object('meta', g.meta) end
                || case when g.journal < 4 then '{}' else jsonb_build_object('state', g.state) end,
            'command', jsonb_strip_nulls(jsonb_build_object('type', 'rerun', 'key', $4::text, 'reason', $3::text))
                       || jsonb_build_object('metadata', $5::jsonb))) end
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'rerun', 'instance', s.rerun_of::text, $2::text, $3::text, $4::text, $5::jsonb, to_jsonb(s.id) from started s
returning r.result
