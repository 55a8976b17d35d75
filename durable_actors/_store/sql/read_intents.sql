-- read_intents: where these instances stand, for a notifier. Paused ones have nothing to run.
-- params   $1 id bigint[]
-- returns  id · status · queue · step · visit · round · attempt · eligible_at · journal level
-- locks    none
-- index    gen_durable_pkey
select g.id, g.status, g.queue, g.step, g.visit, g.round, g.attempt, g.eligible_at, g.journal
  from durable.gen_durable g
 where g.id = any ($1::bigint[]) and not (g.status = 'runnable' and g.hold = 4)
