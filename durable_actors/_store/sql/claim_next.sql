-- claim_next: claim one due instance for a runner, by the function that workers in other languages call.
-- params   $1 queue text · $2 steps text[] ("machine@version/step") · $3 owner text · $4 lease seconds float8
-- returns  the columns of the function durable.claim_next; nothing if nothing is due
-- moves    claimed · cancelled · compensating · reaped · unfit · expired · timed_out · child_ended · joined · held · shelved · throttled ·
--          dropped · offered · unblocked · doomed · requested
-- locks    as reap_claims, expire_awaits, cancel_children and pick_instances, whose text its parts have: SKIP LOCKED and try-locks. It waits for
--          nobody but for dependents that it tells of an end (tell_untold), and as `complete` for what a doomed row is counted at
-- index    gen_durable_pick, gen_durable_shelf; those of its parts
-- keeps    I2 one live claim per instance · I9 one running step per key, in order · a paused queue, as in pick_instances
select c.id, c.claim_id, c.token, c.lease_until, c.machine, c.version, c.step, c.state, c.attempt, c.visit, c.partition_key, c.parent_id,
       c.awaited, c.signals, c.more_signals, c.children, c.children_counts, c.decision, c.cancellation,
       c.dependencies
  from durable.claim_next($1::text, $2::text[], $3::text, make_interval(secs => $4::float8)) c
